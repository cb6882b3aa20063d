// One forward of a Llama-shaped decoder over packed rows: a single parallel region for all layers.
#pragma once

#include "attention.h"
#include "matmul.h"
#include "rows.h"
#include "threads.h"

namespace truedraft {

// Pointers are borrowed for the length of a call. Null biases and norms mean "has none".
template <typename T>
struct LayerWeights {
  const float* attention_norm;
  PackedWeight<T> qkv;  // [q heads | k heads | v heads]
  const float* q_norm;
  const float* k_norm;
  PackedWeight<T> out;
  const float* mlp_norm;
  PackedWeight<T> gate_up;  // a tile: 16 gate columns, 16 up columns
  PackedWeight<T> down;
  T* k_plane;
  T* v_plane;
  int64_t window;
};

template <typename T>
struct StackInput {
  std::vector<LayerWeights<T>> layers;
  const T* embedding;  // [embedding_rows, hidden]
  const float* final_norm;
  PackedWeight<T> head;
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

template <typename T>
void run_stack(const StackInput<T>& in, int threads);

extern template void run_stack<bf16>(const StackInput<bf16>&, int);
extern template void run_stack<float>(const StackInput<float>&, int);

}  // namespace truedraft
