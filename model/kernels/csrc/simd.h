// Small vector helpers: every one is a fixed sequence of instructions, so a lane's result depends on that lane only.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

namespace truedraft {

using bf16 = uint16_t;

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The low `count` lanes (0..16).
inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1u);
}

inline float bf16_to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

// 16 elements <-> 16 fp32 lanes. The narrowing is round-to-nearest-even; NaN stays NaN.
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline void store16(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline __m256i narrow16(__m512 v) {
  // Integer rounding, not vcvtneps2bf16: that one flushes denormals.
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_set1_epi32(rounded, nan, 0x7FC0);
  return _mm512_cvtepi32_epi16(rounded);
}
inline void store16(bf16* p, __m512 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(v)); }

// The same for the lanes of a mask; full masks go the short way, because some processors are slow at masked stores.
inline __m512 load16(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline __m512 load16(const bf16* p, __mmask16 mask) {
  if (mask == 0xFFFF) return load16(p);
  const __m256i raw = _mm256_maskz_loadu_epi16(mask, p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline void store16(float* p, __m512 v, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, v); }
inline void store16(bf16* p, __m512 v, __mmask16 mask) {
  if (mask == 0xFFFF) return store16(p, v);
  _mm256_mask_storeu_epi16(p, mask, narrow16(v));
}

// Sum of 16 lanes in one fixed tree.
inline float sum_lanes(__m512 v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

inline float max_lanes(__m512 v) { return _mm512_reduce_max_ps(v); }

// exp in fp32: x = n ln 2 + r, degree-6 polynomial on |r| <= ln 2 / 2. About 1 ulp; exp(-inf) = 0; NaN stays NaN.
inline __m512 exp16(__m512 x) {
  const __m512 clamped = _mm512_min_ps(_mm512_max_ps(_mm512_set1_ps(-104.0f), x), _mm512_set1_ps(89.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __m512 result = _mm512_scalef_ps(p, n);
  return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

inline float exp1(float x) { return _mm512_cvtss_f32(exp16(_mm512_set1_ps(x))); }

// tanh through exp: 1 - 2 / (exp(2x) + 1).
inline __m512 tanh16(__m512 x) {
  const __m512 e = exp16(_mm512_add_ps(x, x));
  const __m512 q = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
  return _mm512_sub_ps(_mm512_set1_ps(1.0f), q);
}

// x * sigmoid(x)
inline __m512 silu16(__m512 x) {
  const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// Dot-product step: one 32-bit word of activations (two bf16, or one fp32) against 16 columns.
template <typename T>
struct Word;

template <>
struct Word<bf16> {
  static constexpr int kWidth = 2;  // elements of k in a word
  static __m512 dot(__m512 acc, __m512i weights, __m512i word) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(word));
  }
};

template <>
struct Word<float> {
  static constexpr int kWidth = 1;
  static __m512 dot(__m512 acc, __m512i weights, __m512i word) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(word), acc);
  }
};

// Whole numbers: four products of an unsigned and a signed byte are added to each 32-bit sum, without saturation.
template <>
struct Word<int8_t> {
  static constexpr int kWidth = 4;
  static __m512i dot(__m512i acc, __m512i weights, __m512i word) { return _mm512_dpbusd_epi32(acc, weights, word); }
};

inline __m512i broadcast_word(const void* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}

// 16 x 16 words: r[i] lane j <-> r[j] lane i.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

}  // namespace truedraft
