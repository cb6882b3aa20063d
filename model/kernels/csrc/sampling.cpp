#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "philox.h"
#include "simd.h"
#include "threads.h"

namespace truedraft {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

template <typename Body>
void each_row(int64_t rows, int threads, Body body) {
  parallel_region(static_cast<int>(std::min<int64_t>(threads, rows)), 1, [&](Worker& worker) { worker.each(rows, body); });
}

// False unless the greatest logit is finite and nothing is NaN.
bool greatest(const float* row, int64_t vocab, float& peak) {
  __m512 best = _mm512_set1_ps(kNegInf);
  __mmask16 nan = 0;
  for (int64_t i = 0; i < vocab; i += 16) {
    const __mmask16 mask = first_lanes(vocab - i);
    const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(kNegInf), mask, row + i);
    nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    best = _mm512_max_ps(best, v);
  }
  peak = max_lanes(best);
  return nan == 0 && std::isfinite(peak);
}

int64_t first_equal(const float* row, int64_t vocab, float value) {
  for (int64_t i = 0; i < vocab; i += 16) {
    const __mmask16 mask = first_lanes(vocab - i);
    const __mmask16 equal = _mm512_mask_cmp_ps_mask(mask, load16(row + i, mask), _mm512_set1_ps(value), _CMP_EQ_OQ);
    if (equal) return i + __builtin_ctz(equal);
  }
  return -1;
}

// exp in double for x <= 0: x = n ln 2 + r, Taylor to r^13. Below -745 the result is 0.
__m512d exp8(__m512d x) {
  x = _mm512_max_pd(x, _mm512_set1_pd(-750.0));
  const __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634074)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(6.93147180369123816490e-01), x);
  r = _mm512_fnmadd_pd(n, _mm512_set1_pd(1.90821492927058770002e-10), r);
  double factor = 1.0 / 6227020800.0;  // 1 / 13!
  __m512d p = _mm512_set1_pd(factor);
  for (int k = 13; k >= 1; --k) {
    factor *= k;
    p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(factor));
  }
  return _mm512_scalef_pd(p, n);
}

double logsumexp(const float* row, int64_t vocab) {
  float peak;
  if (!greatest(row, vocab, peak)) return kNan;
  const __m512d top = _mm512_set1_pd(peak);
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (int64_t i = 0; i < vocab; i += 16) {
    const __mmask16 mask = first_lanes(vocab - i);
    const __m512 v = load16(row + i, mask);
    const __m512d low = exp8(_mm512_sub_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), top));
    const __m512d high = exp8(_mm512_sub_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)), top));
    sums[0] = _mm512_mask_add_pd(sums[0], static_cast<__mmask8>(mask), sums[0], low);
    sums[1] = _mm512_mask_add_pd(sums[1], static_cast<__mmask8>(mask >> 8), sums[1], high);
  }
  alignas(64) double lanes[8];
  _mm512_store_pd(lanes, _mm512_add_pd(sums[0], sums[1]));
  const double total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  return static_cast<double>(peak) + std::log(total);
}

// One row's race. A runner's time is E * exp(-score): exact for those that can still win.
class Race {
 public:
  Race(const float* row, int64_t vocab, float peak, double temperature, NoiseKey key)
      : row_(row), vocab_(vocab), peak_(peak), temperature_(temperature), key_(key) {}

  double score(int64_t token) const { return (static_cast<double>(row_[token]) - peak_) / temperature_; }

  void run(int64_t token) {
    const double time = -std::log(uniform(key_, token)) * std::exp(-score(token));
    if (time < best_ || (time == best_ && token < winner_)) {
      best_ = time;
      winner_ = token;
    }
  }

  // All tokens. E >= 1 - U > d / 2^32 with d = 2^32 - 1 - (high word of U), so a token can only win if
  // d / 2^32 <= best * exp(score); the slack covers the rounding of the right side in fp32.
  void run_all(int64_t leader) {
    run(leader);
    const auto inverse = static_cast<float>(std::min(1.0 / temperature_, 3e38));
    const __m512 scale = _mm512_set1_ps(inverse), peak = _mm512_set1_ps(peak_);
    const __m512i even_lanes = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd_lanes = _mm512_add_epi32(even_lanes, _mm512_set1_epi32(1));
    for (int64_t first = 0; first < vocab_; first += 32) {
      const __m512 nothing = _mm512_set1_ps(kNegInf);
      const __m512 a = _mm512_mask_loadu_ps(nothing, first_lanes(vocab_ - first), row_ + first);
      const __m512 b = _mm512_mask_loadu_ps(nothing, first_lanes(vocab_ - first - 16), row_ + first + 16);
      __m512i high[2];
      philox_high16(key_, static_cast<uint32_t>(first >> 1), high[0], high[1]);
      uint32_t hopeful[2];
      for (int odd = 0; odd < 2; ++odd) {
        const __m512 logits = _mm512_permutex2var_ps(a, odd ? odd_lanes : even_lanes, b);
        const __m512 bound = _mm512_mul_ps(exp16(_mm512_mul_ps(_mm512_sub_ps(logits, peak), scale)),
                                           _mm512_set1_ps(static_cast<float>(best_ * 1.0001)));
        const __m512i distance = _mm512_xor_si512(high[odd], _mm512_set1_epi32(-1));
        const __m512 least = _mm512_mul_ps(
            _mm512_cvt_roundepu32_ps(distance, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC), _mm512_set1_ps(0x1p-32f));
        hopeful[odd] = _mm512_cmp_ps_mask(least, bound, _CMP_LE_OQ);
      }
      for (uint32_t any = hopeful[0] | hopeful[1]; any; any &= any - 1) {
        const int pair = __builtin_ctz(any);
        for (int odd = 0; odd < 2; ++odd) {
          const int64_t token = first + 2 * pair + odd;
          if ((hopeful[odd] >> pair & 1) && token < vocab_) run(token);
        }
      }
    }
  }

  int64_t winner() const { return winner_; }

 private:
  const float* row_;
  int64_t vocab_;
  float peak_;
  double temperature_;
  NoiseKey key_;
  double best_ = std::numeric_limits<double>::infinity();
  int64_t winner_ = std::numeric_limits<int64_t>::max();
};

struct Runner {
  int64_t token;
  double score;
};

// Higher score first, then lower id.
bool ahead(const Runner& a, const Runner& b) { return a.score > b.score || (a.score == b.score && a.token < b.token); }

// The smallest set of best runners that holds `top_p` of the mass.
void keep_nucleus(std::vector<Runner>& runners, double top_p) {
  double total = 0;
  for (const Runner& runner : runners) total += std::exp(runner.score);
  const double wanted = top_p * total;
  double mass = 0;
  size_t sorted = 0;
  for (size_t size = 256;; size *= 8) {
    const size_t end = std::min(size, runners.size());
    if (end < runners.size()) {
      std::nth_element(runners.begin() + static_cast<std::ptrdiff_t>(sorted), runners.begin() + static_cast<std::ptrdiff_t>(end),
                       runners.end(), ahead);
    }
    std::sort(runners.begin() + static_cast<std::ptrdiff_t>(sorted), runners.begin() + static_cast<std::ptrdiff_t>(end), ahead);
    for (; sorted < end; ++sorted) {
      mass += std::exp(runners[sorted].score);
      if (mass >= wanted) {
        runners.resize(sorted + 1);
        return;
      }
    }
    if (end == runners.size()) return;
  }
}

int64_t sample(const SampleInput& in, int64_t r) {
  const float* row = in.logits + r * in.vocab;
  float peak;
  if (!greatest(row, in.vocab, peak)) return -1;
  Race race(row, in.vocab, peak, in.temperature[r], NoiseKey(in.seeds[r], in.steps[r]));
  const bool min_p = in.min_p[r] > 0, top_k = in.top_k[r] > 0 && in.top_k[r] < in.vocab, top_p = in.top_p[r] < 1;
  if (!min_p && !top_k && !top_p) {
    race.run_all(first_equal(row, in.vocab, peak));
    return race.winner();
  }
  const double floor = min_p ? std::log(in.min_p[r]) : kMinusInf;
  std::vector<Runner> runners;
  for (int64_t token = 0; token < in.vocab; ++token) {
    const double score = race.score(token);
    if (min_p ? score >= floor : score > kMinusInf) runners.push_back({token, score});
  }
  if (top_k && static_cast<size_t>(in.top_k[r]) < runners.size()) {
    const auto k = static_cast<std::ptrdiff_t>(in.top_k[r]);
    std::nth_element(runners.begin(), runners.begin() + k, runners.end(), ahead);
    runners.resize(static_cast<size_t>(k));
  }
  if (top_p) {
    // The total is summed in id order, whatever top_k left behind.
    std::sort(runners.begin(), runners.end(), [](const Runner& a, const Runner& b) { return a.token < b.token; });
    keep_nucleus(runners, in.top_p[r]);
  }
  for (const Runner& runner : runners) race.run(runner.token);
  return race.winner();
}

}  // namespace

void argmax_rows(const float* logits, int64_t rows, int64_t vocab, int64_t* out, int threads) {
  each_row(rows, threads, [&](int64_t r) {
    const float* row = logits + r * vocab;
    float peak;
    out[r] = greatest(row, vocab, peak) ? first_equal(row, vocab, peak) : -1;
  });
}

void logsumexp_rows(const float* logits, int64_t rows, int64_t vocab, double* out, int threads) {
  each_row(rows, threads, [&](int64_t r) { out[r] = logsumexp(logits + r * vocab, vocab); });
}

void keyed_sample_rows(const SampleInput& in, int64_t* out, int threads) {
  each_row(in.rows, threads, [&](int64_t r) { out[r] = sample(in, r); });
}

void keyed_uniforms(int64_t seed, int64_t step, int64_t count, double* out) {
  const NoiseKey key(seed, step);
  for (int64_t i = 0; i < count; ++i) out[i] = uniform(key, i);
}

}  // namespace truedraft
