// Definition of run_stack; instantiated once per element type, each in its own translation unit.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "stack.h"

namespace truedraft {

// Grow-only, 64-byte aligned, uninitialised. Owned by the calling thread.
class Buffer {
 public:
  template <typename U>
  U* take(int64_t count) {
    const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(U)), 64));
    if (bytes > size_) {
      void* fresh = std::aligned_alloc(64, bytes);
      if (fresh == nullptr) throw std::bad_alloc();
      data_.reset(fresh);
      size_ = bytes;
    }
    return static_cast<U*>(data_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

template <typename T>
struct Workspace {
  Buffer residual, normed, qkv, query, attended, gated, partials;
  std::vector<AttentionScratch<T>> scratch;
};

// Activations are padded to whole words. run_stack zeroes the padding once; nothing writes it afterwards.
template <typename T>
int64_t word_padded(int64_t n) {
  return round_up(n, Word<T>::kWidth);
}

template <typename T>
AttentionInput<T> attention_input(const StackInput<T>& in, int64_t window, const T* query, T* attended) {
  AttentionInput<T> a{};
  a.q = query;
  a.out = attended;
  a.q_stride = a.out_stride = word_padded<T>(in.shape.heads * in.shape.dim);
  a.shape = in.shape;
  a.positions = in.positions;
  a.row_starts = in.row_starts;
  a.tables = in.block_tables;
  a.sequences = in.sequences;
  a.table_width = in.table_width;
  a.block_size = in.block_size;
  a.window = window;
  a.scale = in.scale;
  a.softcap = in.softcap;
  return a;
}

template <typename T>
void run_stack(const StackInput<T>& in, int threads) {
  thread_local Workspace<T> work;
  const int64_t rows = in.rows, hidden = in.hidden, depth = static_cast<int64_t>(in.layers.size());
  const int64_t hidden_pad = word_padded<T>(hidden), inter_pad = word_padded<T>(in.intermediate);
  const int64_t heads_pad = word_padded<T>(in.shape.heads * in.shape.dim), qkv_columns = in.shape.columns();
  float* residual = work.residual.template take<float>(rows * hidden);
  T* normed = work.normed.template take<T>(rows * hidden_pad);
  float* qkv = work.qkv.template take<float>(rows * qkv_columns);
  T* query = work.query.template take<T>(rows * heads_pad);
  T* attended = work.attended.template take<T>(rows * heads_pad);
  T* gated = work.gated.template take<T>(rows * inter_pad);

  // Layers with the same window share a plan.
  std::vector<int64_t> windows;
  std::vector<AttentionPlan> plans;
  std::vector<size_t> plan_of(in.layers.size());
  int64_t partials_needed = 1;
  for (size_t l = 0; l < in.layers.size(); ++l) {
    const auto found = std::find(windows.begin(), windows.end(), in.layers[l].window);
    plan_of[l] = static_cast<size_t>(found - windows.begin());
    if (found != windows.end()) continue;
    windows.push_back(in.layers[l].window);
    plans.push_back(plan_attention(attention_input<T>(in, in.layers[l].window, query, attended), threads));
    partials_needed = std::max(partials_needed, plans.back().partials * partial_stride(in.shape.dim));
  }
  float* partials = work.partials.template take<float>(partials_needed);
  if (work.scratch.size() < static_cast<size_t>(threads)) work.scratch.resize(static_cast<size_t>(threads));
  std::vector<AttentionScratch<T>>& scratches = work.scratch;

  constexpr int64_t layer_phases = 8 + kAttentionPhases, outer_phases = 3;
  parallel_region(threads, depth * layer_phases + outer_phases, [&](Worker& worker) {
    AttentionScratch<T>& scratch = scratches[static_cast<size_t>(worker.id())];
    scratch.fit(in.shape);
    std::vector<float> head_scratch(static_cast<size_t>(in.shape.dim));

    auto each_row = [&](int64_t count, auto task) {
      worker.each_range(count, count, [&](Range mine) {
        for (int64_t r = mine.begin; r < mine.end; ++r) task(r);
      });
    };
    auto product = [&](const PackedWeight<T>& weight, const T* input, int64_t stride, int64_t count, auto epilogue) {
      worker.each_range(weight.tiles, weight.tiles, [&](Range tiles) {
        matmul_tiles(weight, input, stride, count, tiles, epilogue);
      });
    };
    auto normalise = [&](const float* weight) {
      each_row(rows, [&](int64_t r) {
        rms_norm_row(residual + r * hidden, weight, hidden, in.eps, normed + r * hidden_pad);
      });
    };

    each_row(rows, [&](int64_t r) {
      convert_row(in.embedding + in.input_ids[r] * hidden, hidden, residual + r * hidden);
      std::fill(normed + r * hidden_pad + hidden, normed + (r + 1) * hidden_pad, T(0));
      std::fill(gated + r * inter_pad + in.intermediate, gated + (r + 1) * inter_pad, T(0));
    });
    for (int64_t l = 0; l < depth; ++l) {
      const LayerWeights<T>& layer = in.layers[static_cast<size_t>(l)];
      normalise(layer.attention_norm);
      product(layer.qkv, normed, hidden_pad, rows, StoreColumns<float>{qkv, qkv_columns, qkv_columns});
      each_row(rows, [&](int64_t r) {
        const int64_t slot = in.slots[r] * in.shape.kv_heads * in.shape.dim, angle = in.positions[r] * (in.shape.dim / 2);
        rope_row(qkv + r * qkv_columns, in.shape, layer.q_norm, layer.k_norm, in.eps, in.cosine + angle,
                 in.sine + angle, query + r * heads_pad, layer.k_plane + slot, layer.v_plane + slot,
                 head_scratch.data());
      });
      AttentionInput<T> attention = attention_input<T>(in, layer.window, query, attended);
      attention.k = layer.k_plane;
      attention.v = layer.v_plane;
      attend(attention, plans[plan_of[static_cast<size_t>(l)]], partials, scratch, worker);
      product(layer.out, attended, heads_pad, rows, AddColumns{residual, hidden, hidden});
      normalise(layer.mlp_norm);
      product(layer.gate_up, normed, hidden_pad, rows, GateColumns<T>{gated, inter_pad, in.intermediate});
      product(layer.down, gated, inter_pad, rows, AddColumns{residual, hidden, hidden});
      each_row(in.capture != nullptr ? rows : 0, [&](int64_t r) {
        convert_row(residual + r * hidden, hidden, in.capture + (l * rows + r) * hidden);
      });
    }
    each_row(in.logits_count, [&](int64_t i) {
      T* row = normed + i * hidden_pad;
      rms_norm_row(residual + in.logits_rows[i] * hidden, in.final_norm, hidden, in.eps, row);
      std::memcpy(in.hidden_out + i * hidden, row, static_cast<size_t>(hidden) * sizeof(T));
    });
    product(in.head, normed, hidden_pad, in.logits_count, StoreColumns<float>{in.logits, in.vocab, in.vocab});
  });
}

}  // namespace truedraft
