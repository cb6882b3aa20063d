// Definition of run_stack; instantiated once per element type, each in its own translation unit.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "stack.h"

namespace truedraft {

// Grow-only, 64-byte aligned; contents are zero when memory is (re)taken. Owned by the calling thread.
class Buffer {
 public:
  template <typename U>
  U* take(int64_t count) {
    const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(U)), 64));
    if (bytes > size_) {
      void* fresh = std::aligned_alloc(64, bytes);
      if (fresh == nullptr) throw std::bad_alloc();
      std::memset(fresh, 0, bytes);
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

// Activations are padded to whole words; the padding stays zero.
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
  std::vector<TaskCounter> tasks(in.layers.size()), merges(in.layers.size());
  std::vector<AttentionScratch<T>>& scratches = work.scratch;

  parallel_region(threads, [&](Worker& worker) {
    AttentionScratch<T>& scratch = scratches[static_cast<size_t>(worker.id())];
    scratch.fit(in.shape);
    std::vector<float> head_scratch(static_cast<size_t>(in.shape.dim));
    const Range mine = worker.share(rows);

    auto normalise = [&](const float* weight) {
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        rms_norm_row(residual + r * hidden, weight, hidden, in.eps, normed + r * hidden_pad);
      }
      worker.sync();
    };

    for (int64_t r = mine.begin; r < mine.end; ++r) {
      convert_row(in.embedding + in.input_ids[r] * hidden, hidden, residual + r * hidden);
    }
    for (int64_t l = 0; l < depth; ++l) {
      const LayerWeights<T>& layer = in.layers[static_cast<size_t>(l)];
      normalise(layer.attention_norm);
      matmul_tiles(layer.qkv, normed, hidden_pad, rows, worker.share(layer.qkv.tiles),
                   StoreColumns<float>{qkv, qkv_columns, qkv_columns});
      worker.sync();
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        const int64_t slot = in.slots[r] * in.shape.kv_heads * in.shape.dim, angle = in.positions[r] * (in.shape.dim / 2);
        rope_row(qkv + r * qkv_columns, in.shape, layer.q_norm, layer.k_norm, in.eps, in.cosine + angle,
                 in.sine + angle, query + r * heads_pad, layer.k_plane + slot, layer.v_plane + slot,
                 head_scratch.data());
      }
      worker.sync();
      AttentionInput<T> attention = attention_input<T>(in, layer.window, query, attended);
      attention.k = layer.k_plane;
      attention.v = layer.v_plane;
      attention_phase(attention, plans[plan_of[static_cast<size_t>(l)]], tasks[static_cast<size_t>(l)],
                      merges[static_cast<size_t>(l)], partials, scratch, worker);
      worker.sync();
      matmul_tiles(layer.out, attended, heads_pad, rows, worker.share(layer.out.tiles),
                   AddColumns{residual, hidden, hidden});
      worker.sync();
      normalise(layer.mlp_norm);
      matmul_tiles(layer.gate_up, normed, hidden_pad, rows, worker.share(layer.gate_up.tiles),
                   GateColumns<T>{gated, inter_pad, in.intermediate});
      worker.sync();
      matmul_tiles(layer.down, gated, inter_pad, rows, worker.share(layer.down.tiles),
                   AddColumns{residual, hidden, hidden});
      worker.sync();
      if (in.capture != nullptr) {
        std::memcpy(in.capture + (l * rows + mine.begin) * hidden, residual + mine.begin * hidden,
                    static_cast<size_t>((mine.end - mine.begin) * hidden) * sizeof(float));
      }
    }
    const Range wanted = worker.share(in.logits_count);
    for (int64_t i = wanted.begin; i < wanted.end; ++i) {
      T* row = normed + i * hidden_pad;
      rms_norm_row(residual + in.logits_rows[i] * hidden, in.final_norm, hidden, in.eps, row);
      std::memcpy(in.hidden_out + i * hidden, row, static_cast<size_t>(hidden) * sizeof(T));
    }
    worker.sync();
    matmul_tiles(in.head, normed, hidden_pad, in.logits_count, worker.share(in.head.tiles),
                 StoreColumns<float>{in.logits, in.vocab, in.vocab});
  });
}

}  // namespace truedraft
