// One forward of a Llama-shaped decoder over packed rows: a single parallel region for all layers.
#pragma once

#include "attention.h"
#include "matmul.h"
#include "rows.h"
#include "threads.h"

namespace truedraft {

// T: the element type of the model, its K and V; W: that of the products' weights, T or int8_t.
// Pointers are borrowed for the length of a call. Null biases and norms mean "has none".
template <typename T, typename W>
struct LayerWeights {
  const float* attention_norm;
  PackedWeight<W> qkv;  // [q heads | k heads | v heads]
  const float* q_norm;
  const float* k_norm;
  PackedWeight<W> out;
  const float* mlp_norm;
  PackedWeight<W> gate_up;  // a tile: 16 gate columns, 16 up columns
  PackedWeight<W> down;
  T* k_plane;
  T* v_plane;
  int64_t window;
};

template <typename T, typename W>
struct StackInput {
  std::vector<LayerWeights<T, W>> layers;
  const T* embedding;  // [embedding_rows, hidden]
  const float* final_norm;
  PackedWeight<W> head;
  HeadShape shape;
  int64_t hidden, intermediate, vocab;
  float eps, scale, softcap;

  const int64_t* input_ids;     // [rows]
  const int64_t* positions;     // [rows]
  const int64_t* slots;         // [rows]
  const int32_t* row_starts;    // [sequences + 1]
  const int32_t* block_tables;  // [sequences, table_width]
  const int64_t* logits_rows;   // [logits_count]
  const float* cosine;          // [positions, d / 2]
  const float* sine;
  int64_t rows, sequences, table_width, block_size, logits_count;

  float* logits;   // [logits_count, vocab]
  T* hidden_out;   // [logits_count, hidden]
  float* capture;  // [layers, rows, hidden] or null
};

template <typename T, typename W>
void run_stack(const StackInput<T, W>& in, int threads);

extern template void run_stack(const StackInput<bf16, bf16>&, int);
extern template void run_stack(const StackInput<float, float>&, int);
extern template void run_stack(const StackInput<bf16, int8_t>&, int);
extern template void run_stack(const StackInput<float, int8_t>&, int);

}  // namespace truedraft
