// Philox4x32-10: counter-based noise, one counter for two neighbouring token ids.
//
//   key (seed low, seed high), counter (id >> 1, t low, t high, 0x7D1) -> w0 w1 | w2 w3
//   even id: low w0, high w1; odd id: low w2, high w3; U = (((high << 32 | low) >> 11) + 0.5) * 2^-53
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace truedraft {

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;
constexpr uint32_t kNoiseDomain = 0x7D1;

struct NoiseKey {
  uint32_t k0, k1, t0, t1;
  NoiseKey(int64_t seed, int64_t step)
      : k0(static_cast<uint32_t>(seed)),
        k1(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)),
        t0(static_cast<uint32_t>(step)),
        t1(static_cast<uint32_t>(static_cast<uint64_t>(step) >> 32)) {}
};

struct Words {
  uint32_t w[4];
};

inline Words philox(const NoiseKey& key, uint32_t pair) {
  uint32_t c0 = pair, c1 = key.t0, c2 = key.t1, c3 = kNoiseDomain, k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0, p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

inline double unit_of(uint32_t low, uint32_t high) {
  const uint64_t bits = (static_cast<uint64_t>(high) << 32 | low) >> 11;
  // The largest value would round up to 1, whose -log is 0.
  return std::min((static_cast<double>(bits) + 0.5) * 0x1p-53, 1.0 - 0x1p-53);
}

inline double uniform(const NoiseKey& key, int64_t token) {
  const Words words = philox(key, static_cast<uint32_t>(token >> 1));
  return token & 1 ? unit_of(words.w[2], words.w[3]) : unit_of(words.w[0], words.w[1]);
}

inline void multiply(__m512i a, __m512i m, __m512i& low, __m512i& high) {
  const __m512i even = _mm512_mul_epu32(a, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
  low = _mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
  high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
}

// Counters of 16 neighbouring pairs; the high words of their even and odd ids.
inline void philox_high16(const NoiseKey& key, uint32_t first_pair, __m512i& even, __m512i& odd) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i m0 = _mm512_set1_epi32(static_cast<int>(kPhiloxM0)), m1 = _mm512_set1_epi32(static_cast<int>(kPhiloxM1));
  __m512i c0 = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first_pair)));
  __m512i c1 = _mm512_set1_epi32(static_cast<int>(key.t0)), c2 = _mm512_set1_epi32(static_cast<int>(key.t1));
  __m512i c3 = _mm512_set1_epi32(static_cast<int>(kNoiseDomain));
  uint32_t k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; ++round) {
    __m512i low0, high0, low1, high1;
    multiply(c0, m0, low0, high0);
    multiply(c2, m1, low1, high1);
    c0 = _mm512_ternarylogic_epi32(high1, c1, _mm512_set1_epi32(static_cast<int>(k0)), 0x96);
    c1 = low1;
    c2 = _mm512_ternarylogic_epi32(high0, c3, _mm512_set1_epi32(static_cast<int>(k1)), 0x96);
    c3 = low0;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  even = c1;
  odd = c3;
}

}  // namespace truedraft
