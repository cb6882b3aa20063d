// Work on single rows: RMSNorm, rotary embedding with the K/V write, embedding gather.
#pragma once

#include <algorithm>

#include "simd.h"

namespace truedraft {

// out[i] = x[i] / rms(x) * weight[i]; sums in one fixed order that depends on n only.
template <typename Out>
void rms_norm_row(const float* x, const float* weight, int64_t n, float eps, Out* out) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = load16(x + i, first_lanes(n - i));
    __m512& sum = sums[(i / 16) % 4];
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __m512 total = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
  const float inverse = 1.0f / __builtin_sqrtf(sum_lanes(total) / static_cast<float>(n) + eps);
  const __m512 scale = _mm512_set1_ps(inverse);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    store16(out + i, _mm512_mul_ps(_mm512_mul_ps(load16(x + i, mask), scale), load16(weight + i, mask)), mask);
  }
}

// One head in "rotate half" layout: pairs (i, i + d/2). cosine and sine hold d/2 values of the row's position.
template <typename Out>
void rope_head(const float* x, const float* cosine, const float* sine, int64_t d, Out* out) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 mask = first_lanes(half - i);
    const __m512 a = load16(x + i, mask), b = load16(x + half + i, mask);
    const __m512 c = load16(cosine + i, mask), s = load16(sine + i, mask);
    store16(out + i, _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)), mask);
    store16(out + half + i, _mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s)), mask);
  }
}

template <typename In, typename Out>
void convert_row(const In* x, int64_t n, Out* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first_lanes(n - i);
    store16(out + i, load16(x + i, mask), mask);
  }
}

// Int8 rows (model/int8.py has the definition). kGroup elements share a scale.
constexpr int64_t kGroup = 64;
constexpr int32_t kZeroPoint = 128;  // of an int8 weight: a value v is packed as the byte v + 128

inline int64_t group_count(int64_t n) { return (n + kGroup - 1) / kGroup; }

// One row's values [n, filled up to `padded` with zeros]; for each group its scale, and what the weights' zero point
// adds to its sums, negated.
template <typename In>
void quantize_row(const In* x, int64_t n, int64_t padded, int8_t* out, float* scales, int32_t* offsets) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  for (int64_t begin = 0, group = 0; begin < n; begin += kGroup, ++group) {
    const int64_t end = std::min(n, begin + kGroup);
    __m512i largest = _mm512_setzero_si512();  // of the bits: those of NaN and infinity are above those of all numbers
    for (int64_t i = begin; i < end; i += 16) {
      const __m512 v = load16(x + i, first_lanes(end - i));
      largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(v), magnitude));
    }
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float most;
    __builtin_memcpy(&most, &bits, 4);
    const bool finite = bits < 0x7F800000;
    if (!finite || most < 1e-30f) {
      scales[group] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      offsets[group] = 0;
      __builtin_memset(out + begin, 0, static_cast<size_t>(end - begin));
      continue;
    }
    const __m512 inverse = _mm512_set1_ps(127.0f / most);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = begin; i < end; i += 16) {
      const __mmask16 mask = first_lanes(end - i);
      const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(load16(x + i, mask), inverse));
      sum = _mm512_add_epi32(sum, value);
      const __m128i bytes = _mm512_cvtepi32_epi8(value);
      if (mask == 0xFFFF) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bytes);
      } else {
        _mm_mask_storeu_epi8(out + i, mask, bytes);
      }
    }
    scales[group] = most / 127.0f;
    offsets[group] = -kZeroPoint * _mm512_reduce_add_epi32(sum);
  }
  if (padded > n) __builtin_memset(out + n, 0, static_cast<size_t>(padded - n));
}

struct HeadShape {
  int64_t heads, kv_heads, dim;
  int64_t columns() const { return (heads + 2 * kv_heads) * dim; }
};

// qkv [heads * d | kv_heads * d | kv_heads * d] of one row: q -> q_out, k and v -> the row's slot.
// q_norm and k_norm are [d] or null; `scratch` holds d floats.
template <typename T>
void rope_row(const float* qkv, const HeadShape& shape, const float* q_norm, const float* k_norm, float eps,
              const float* cosine, const float* sine, T* q_out, T* k_slot, T* v_slot, float* scratch) {
  const int64_t d = shape.dim;
  for (int64_t head = 0; head < shape.heads + shape.kv_heads; ++head) {
    const bool is_query = head < shape.heads;
    const float* x = qkv + head * d;
    if (const float* norm = is_query ? q_norm : k_norm) {
      rms_norm_row(x, norm, d, eps, scratch);
      x = scratch;
    }
    rope_head(x, cosine, sine, d, is_query ? q_out + head * d : k_slot + (head - shape.heads) * d);
  }
  convert_row(qkv + (shape.heads + shape.kv_heads) * d, shape.kv_heads * d, v_slot);
}

}  // namespace truedraft
