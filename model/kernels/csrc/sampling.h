// Operations on fp32 logits rows. A row's result depends on that row and its parameters only.
#pragma once

#include <cstdint>

namespace truedraft {

// The lowest id among the greatest logits; -1 for a row with NaN or +inf, or with nothing but -inf.
void argmax_rows(const float* logits, int64_t rows, int64_t vocab, int64_t* out, int threads);

// log(sum(exp(row))) in double, summed in a fixed order; NaN where argmax_rows gives -1.
void logsumexp_rows(const float* logits, int64_t rows, int64_t vocab, double* out, int threads);

struct SampleInput {
  const float* logits;        // [rows, vocab]
  const double* temperature;  // [rows], above 0
  const double* min_p;        // [rows], 0: off
  const int64_t* top_k;       // [rows], 0: off
  const double* top_p;        // [rows], 1: off
  const int64_t* seeds;       // [rows], 64-bit patterns
  const int64_t* steps;       // [rows], output index t
  int64_t rows, vocab;
};

// The exponential race: argmin over v of E_v / p_v, E_v = -log U(seed, t, v); the lowest id on an exact tie.
// -1 where argmax_rows gives -1.
void keyed_sample_rows(const SampleInput& in, int64_t* out, int threads);

// U(seed, t, 0 .. count - 1).
void keyed_uniforms(int64_t seed, int64_t step, int64_t count, double* out);

}  // namespace truedraft
