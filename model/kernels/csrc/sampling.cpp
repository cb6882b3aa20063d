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

// Sum of 8 lanes in one fixed tree.
double sum_in_order(__m512d v) {
  alignas(64) double lanes[8];
  _mm512_store_pd(lanes, v);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// 1 / temperature as fp32 can hold it.
float inverse_of(double temperature) { return static_cast<float>(std::min(1.0 / temperature, 3e38)); }

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
  return static_cast<double>(peak) + std::log(sum_in_order(_mm512_add_pd(sums[0], sums[1])));
}

struct Runner {
  int64_t token;
  double score;
};

// One row's race. A runner's time is E * exp(-score): exact for those that can still win.
class Race {
 public:
  Race(const float* row, int64_t vocab, float peak, double temperature, NoiseKey key)
      : row_(row), vocab_(vocab), peak_(peak), temperature_(temperature), key_(key) {}

  double score(int64_t token) const { return score_of(row_[token]); }
  double score_of(float logit) const { return (static_cast<double>(logit) - peak_) / temperature_; }

  // Whoever is behind `last` does not take part.
  void admit(const Runner& last) { last_ = last; }

  void run(int64_t token) {
    const double mine = score(token);
    if (mine < last_.score || (mine == last_.score && token > last_.token)) return;
    const double time = -std::log(uniform(key_, token)) * std::exp(-mine);
    if (time < best_ || (time == best_ && token < winner_)) {
      best_ = time;
      winner_ = token;
    }
  }

  // All that are admitted. E >= 1 - U > d / 2^32 with d = 2^32 - 1 - (high word of U), so a token can only win if
  // d / 2^32 <= best * exp(score); the slack covers the rounding of the right side in fp32.
  void run_all(int64_t leader) {
    run(leader);
    const __m512 scale = _mm512_set1_ps(inverse_of(temperature_)), peak = _mm512_set1_ps(peak_);
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
  Runner last_{std::numeric_limits<int64_t>::max(), -std::numeric_limits<double>::infinity()};
  double best_ = std::numeric_limits<double>::infinity();
  int64_t winner_ = std::numeric_limits<int64_t>::max();
};

// Higher score first, then lower id.
bool ahead(const Runner& a, const Runner& b) { return a.score > b.score || (a.score == b.score && a.token < b.token); }

// Sorts runners from the best on, only as far as needed, until `enough(mass)` of those passed is true; returns how many
// were passed: all of them if it never is.
template <typename Enough>
size_t walk_best(std::vector<Runner>& runners, Enough enough) {
  double mass = 0;
  size_t sorted = 0;
  const auto at = [&](size_t i) { return runners.begin() + static_cast<std::ptrdiff_t>(i); };
  for (size_t size = 64;; size *= 8) {
    const size_t end = std::min(size, runners.size());
    if (end < runners.size()) std::nth_element(at(sorted), at(end), runners.end(), ahead);
    std::sort(at(sorted), at(end), ahead);
    while (sorted < end) {
      mass += std::exp(runners[sorted++].score);
      if (enough(mass)) return sorted;
    }
    if (end == runners.size()) return sorted;
  }
}

// The greatest logits of groups of up to 64 tokens. The m-th greatest of them is a logit that m tokens reach at least.
class Peaks {
 public:
  // False unless the greatest logit is finite and nothing is NaN.
  bool find(const float* row, int64_t vocab) {
    groups_.clear();
    __m512 best = _mm512_set1_ps(kNegInf);
    __mmask16 nan = 0;
    for (int64_t block = 0; block < vocab; block += 16 * kVectors) {
      __m512 mine = _mm512_set1_ps(kNegInf);
      const int64_t end = std::min(vocab, block + 16 * kVectors);
      for (int64_t i = block; i < end; i += 16) {
        const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(kNegInf), first_lanes(vocab - i), row + i);
        nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        mine = _mm512_max_ps(mine, v);
      }
      best = _mm512_max_ps(best, mine);
      groups_.resize(groups_.size() + 16);
      _mm512_storeu_ps(groups_.data() + groups_.size() - 16, mine);
    }
    peak = max_lanes(best);
    return nan == 0 && std::isfinite(peak);
  }

  // A logit that at least `count` tokens reach; -inf if the groups do not tell.
  float reached_by(size_t count) {
    if (count > groups_.size()) return kNegInf;
    const auto place = groups_.begin() + static_cast<std::ptrdiff_t>(count - 1);
    std::nth_element(groups_.begin(), place, groups_.end(), [](float a, float b) { return a > b; });
    return *place;
  }

  size_t count() const { return groups_.size(); }
  float peak = kNegInf;

 private:
  static constexpr int64_t kVectors = 64;
  std::vector<float> groups_;
};

// Tokens whose logit is finite and whose score is at least `floor`, by ascending id. `least`: no such logit is lower.
void collect(const Race& race, const float* row, int64_t vocab, double least, double floor,
             std::vector<Runner>& runners) {
  runners.clear();
  const __m512 bound = _mm512_set1_ps(static_cast<float>(least)), lowest = _mm512_set1_ps(kNegInf);
  for (int64_t i = 0; i < vocab; i += 16) {
    const __m512 v = _mm512_mask_loadu_ps(lowest, first_lanes(vocab - i), row + i);
    uint32_t chosen = _mm512_cmp_ps_mask(v, bound, _CMP_GE_OQ) & _mm512_cmp_ps_mask(v, lowest, _CMP_GT_OQ);
    for (; chosen; chosen &= chosen - 1) {
      const Runner runner{i + __builtin_ctz(chosen), race.score(i + __builtin_ctz(chosen))};
      if (runner.score >= floor) runners.push_back(runner);
    }
  }
}

// The same for all whose score is at least that of the logit `least`. Lower logits may have the same score: what tells
// them apart is lost beside the peak.
void collect_from(const Race& race, const float* row, int64_t vocab, float peak, float least,
                  std::vector<Runner>& runners) {
  const double room = 1e-15 * (static_cast<double>(peak) - least);
  collect(race, row, vocab, least - room, race.score_of(least), runners);
}

// sum(exp(score)) of a whole row in double, in a fixed order.
double whole_mass(const float* row, int64_t vocab, float peak, double temperature) {
  const __m512d top = _mm512_set1_pd(peak), divisor = _mm512_set1_pd(temperature);
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (int64_t i = 0; i < vocab; i += 16) {
    const __mmask16 mask = first_lanes(vocab - i);
    const __m512 v = load16(row + i, mask);
    for (int half = 0; half < 2; ++half) {
      const __m256 eight = half ? _mm512_extractf32x8_ps(v, 1) : _mm512_castps512_ps256(v);
      const __m512d score = _mm512_div_pd(_mm512_sub_pd(_mm512_cvtps_pd(eight), top), divisor);
      sums[half] = _mm512_mask_add_pd(sums[half], static_cast<__mmask8>(mask >> (8 * half)), sums[half], exp8(score));
    }
  }
  return sum_in_order(_mm512_add_pd(sums[0], sums[1]));
}

// The same in fp32, good to kMassError: a score is off by 3 * 2^-24 of itself, and the mean of |score| under the
// distribution is at most log(vocab); exp16 and sums of four add a few ulp.
constexpr double kMassError = 1e-5;

double about_whole_mass(const float* row, int64_t vocab, float peak, float inverse) {
  const __m512 top = _mm512_set1_ps(peak), scale = _mm512_set1_ps(inverse), lowest = _mm512_set1_ps(kNegInf);
  __m512d sum = _mm512_setzero_pd();
  for (int64_t i = 0; i < vocab; i += 64) {
    __m512 weight[4];
    for (int j = 0; j < 4; ++j) {
      const __m512 v = _mm512_mask_loadu_ps(lowest, first_lanes(vocab - i - 16 * j), row + i + 16 * j);
      weight[j] = exp16(_mm512_mul_ps(_mm512_sub_ps(v, top), scale));
    }
    const __m512 four = _mm512_add_ps(_mm512_add_ps(weight[0], weight[1]), _mm512_add_ps(weight[2], weight[3]));
    sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(four)));
    sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(four, 1)));
  }
  return sum_in_order(sum);
}

// What one thread needs for a row with filters.
struct Filter {
  Peaks peaks;
  std::vector<Runner> runners;
};

// The smallest set of best tokens that holds `top_p` of the mass of all tokens -> filter.runners, best first.
// The mass of all is needed only as well as the border asks for: an estimate first, and in double if that leaves open
// where the border is. The result is that of the mass in double.
void find_nucleus(const Race& race, const float* row, int64_t vocab, double temperature, double top_p, Filter& filter) {
  std::vector<Runner>& runners = filter.runners;
  double low = 0, high = 0;
  const auto expect = [&](double mass, double error) {
    low = top_p * mass * (1 - error);
    high = top_p * mass * (1 + error);
  };
  expect(about_whole_mass(row, vocab, filter.peaks.peak, inverse_of(temperature)), kMassError);
  for (size_t count = 32;; count = count < filter.peaks.count() ? std::min(8 * count, filter.peaks.count()) : vocab) {
    const float least = filter.peaks.reached_by(count);
    collect_from(race, row, vocab, filter.peaks.peak, least, runners);
    bool open = false, ended = false;
    const auto walk = [&](double mass) {
      open = mass >= low && mass < high;
      return ended = mass >= low;
    };
    size_t kept = walk_best(runners, walk);
    if (open) {
      expect(whole_mass(row, vocab, filter.peaks.peak, temperature), 0);
      ended = false;
      kept = walk_best(runners, walk);
    }
    if (ended || least == kNegInf) {
      runners.resize(kept);
      return;
    }
  }
}

// min_p, top_k, then top_p -> filter.runners.
void find_kept(const Race& race, const SampleInput& in, int64_t r, const float* row, Filter& filter) {
  std::vector<Runner>& runners = filter.runners;
  const bool min_p = in.min_p[r] > 0, top_k = in.top_k[r] > 0 && in.top_k[r] < in.vocab, top_p = in.top_p[r] < 1;
  if (!min_p && !top_k) return find_nucleus(race, row, in.vocab, in.temperature[r], in.top_p[r], filter);
  if (min_p) {
    const double floor = std::log(in.min_p[r]), peak = filter.peaks.peak, fall = in.temperature[r] * floor;
    // With some room: the scores decide.
    const double least = peak + fall - 1e-6 * (std::abs(peak) + std::abs(fall));
    collect(race, row, in.vocab, least, floor, runners);
  } else {
    const float least = filter.peaks.reached_by(static_cast<size_t>(in.top_k[r]));
    collect_from(race, row, in.vocab, filter.peaks.peak, least, runners);
  }
  if (top_k && static_cast<size_t>(in.top_k[r]) < runners.size()) {
    const auto k = static_cast<std::ptrdiff_t>(in.top_k[r]);
    std::nth_element(runners.begin(), runners.begin() + k, runners.end(), ahead);
    runners.resize(static_cast<size_t>(k));
  }
  if (top_p) {
    // The total is summed in id order, whatever top_k left behind.
    std::sort(runners.begin(), runners.end(), [](const Runner& a, const Runner& b) { return a.token < b.token; });
    double total = 0;
    for (const Runner& runner : runners) total += std::exp(runner.score);
    const double wanted = in.top_p[r] * total;
    runners.resize(walk_best(runners, [&](double mass) { return mass >= wanted; }));
  }
}

constexpr size_t kFew = 512;  // runners that are faster one by one than as a part of all

int64_t sample(const SampleInput& in, int64_t r) {
  thread_local Filter filter;
  const float* row = in.logits + r * in.vocab;
  if (!filter.peaks.find(row, in.vocab)) return -1;
  const float peak = filter.peaks.peak;
  Race race(row, in.vocab, peak, in.temperature[r], NoiseKey(in.seeds[r], in.steps[r]));
  const bool all = in.min_p[r] <= 0 && (in.top_k[r] <= 0 || in.top_k[r] >= in.vocab) && in.top_p[r] >= 1;
  if (!all) {
    find_kept(race, in, r, row, filter);
    if (filter.runners.size() <= kFew) {
      for (const Runner& runner : filter.runners) race.run(runner.token);
      return race.winner();
    }
    race.admit(*std::max_element(filter.runners.begin(), filter.runners.end(), ahead));
  }
  race.run_all(first_equal(row, in.vocab, peak));
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
