// Definition of run_stack; instantiated once per element type, each in its own translation unit.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>

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
  Buffer residual, normed, qkv, query, attended, gated, partials, values, scales, offsets;
  std::vector<AttentionScratch<T>> scratch;
};

// Activations are padded to whole words. run_stack zeroes the padding once; nothing writes it afterwards.
template <typename T>
int64_t word_padded(int64_t n) {
  return round_up(n, Word<T>::kWidth);
}

template <typename T, typename W>
AttentionInput<T> attention_input(const StackInput<T, W>& in, int64_t window, const T* query, T* attended) {
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

template <typename T, typename W>
void run_stack(const StackInput<T, W>& in, int threads) {
  constexpr bool int8 = std::is_same_v<W, int8_t>;
  using Gated = std::conditional_t<int8, float, T>;  // it is quantised when a row is complete
  thread_local Workspace<T> work;
  const int64_t rows = in.rows, hidden = in.hidden, depth = static_cast<int64_t>(in.layers.size());
  const int64_t hidden_pad = word_padded<T>(hidden), inter_pad = word_padded<T>(in.intermediate);
  const int64_t heads_pad = word_padded<T>(in.shape.heads * in.shape.dim), qkv_columns = in.shape.columns();
  float* residual = work.residual.template take<float>(rows * hidden);
  T* normed = work.normed.template take<T>(rows * hidden_pad);
  float* qkv = work.qkv.template take<float>(rows * qkv_columns);
  T* query = work.query.template take<T>(rows * heads_pad);
  T* attended = work.attended.template take<T>(rows * heads_pad);
  Gated* gated = work.gated.template take<Gated>(rows * inter_pad);
  // Int8: the rows of the product that comes next, whichever it is.
  const int64_t longest = std::max({hidden, in.intermediate, in.shape.heads * in.shape.dim});
  int8_t* values = work.values.template take<int8_t>(int8 ? rows * word_padded<int8_t>(longest) : 0);
  float* scales = work.scales.template take<float>(int8 ? rows * group_count(longest) : 0);
  int32_t* offsets = work.offsets.template take<int32_t>(int8 ? rows * group_count(longest) : 0);

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
    plans.push_back(plan_attention(attention_input(in, in.layers[l].window, query, attended), threads));
    partials_needed = std::max(partials_needed, plans.back().partials * partial_stride(in.shape.dim));
  }
  float* partials = work.partials.template take<float>(partials_needed);
  if (work.scratch.size() < static_cast<size_t>(threads)) work.scratch.resize(static_cast<size_t>(threads));
  std::vector<AttentionScratch<T>>& scratches = work.scratch;

  constexpr int64_t layer_phases = 8 + kAttentionPhases + (int8 ? 2 : 0), outer_phases = 3;
  parallel_region(threads, depth * layer_phases + outer_phases, [&](Worker& worker) {
    AttentionScratch<T>& scratch = scratches[static_cast<size_t>(worker.id())];
    scratch.fit(in.shape);
    std::vector<float> head_scratch(static_cast<size_t>(in.shape.dim)), row_scratch(static_cast<size_t>(int8 ? hidden : 0));

    auto each_row = [&](int64_t count, auto task) {
      worker.each_range(count, count, [&](Range mine) {
        for (int64_t r = mine.begin; r < mine.end; ++r) task(r);
      });
    };
    // Of `input` [count, stride], or of what was quantised last; n: the elements of a row.
    auto product = [&](const PackedWeight<W>& weight, const auto* input, int64_t stride, int64_t n, int64_t count,
                       auto epilogue) {
      MatmulRows<W> taken;
      if constexpr (int8) {
        taken = {values, word_padded<int8_t>(n), scales, offsets, group_count(n)};
      } else {
        taken = {input, stride};
      }
      worker.each_range(weight.tiles, weight.tiles, [&](Range tiles) {
        matmul_tiles(weight, taken, count, tiles, epilogue);
      });
    };
    auto quantize = [&](const auto* x, int64_t n, int64_t r) {
      const int64_t padded = word_padded<int8_t>(n), groups = group_count(n);
      quantize_row(x, n, padded, values + r * padded, scales + r * groups, offsets + r * groups);
    };
    auto quantize_each = [&](const auto* x, int64_t stride, int64_t n) {
      if constexpr (int8) each_row(rows, [&](int64_t r) { quantize(x + r * stride, n, r); });
    };
    // Of the residual stream's row `from`, as row `r` of the next product.
    auto normalise_row = [&](const float* weight, int64_t from, int64_t r) {
      if constexpr (int8) {
        rms_norm_row(residual + from * hidden, weight, hidden, in.eps, row_scratch.data());
        quantize(row_scratch.data(), hidden, r);
      } else {
        rms_norm_row(residual + from * hidden, weight, hidden, in.eps, normed + r * hidden_pad);
      }
    };
    auto normalise = [&](const float* weight) { each_row(rows, [&](int64_t r) { normalise_row(weight, r, r); }); };

    each_row(rows, [&](int64_t r) {
      convert_row(in.embedding + in.input_ids[r] * hidden, hidden, residual + r * hidden);
      std::fill(normed + r * hidden_pad + hidden, normed + (r + 1) * hidden_pad, T(0));
      std::fill(gated + r * inter_pad + in.intermediate, gated + (r + 1) * inter_pad, Gated(0));
    });
    for (int64_t l = 0; l < depth; ++l) {
      const LayerWeights<T, W>& layer = in.layers[static_cast<size_t>(l)];
      normalise(layer.attention_norm);
      product(layer.qkv, normed, hidden_pad, hidden, rows, StoreColumns<float>{qkv, qkv_columns, qkv_columns});
      each_row(rows, [&](int64_t r) {
        const int64_t slot = in.slots[r] * in.shape.kv_heads * in.shape.dim, angle = in.positions[r] * (in.shape.dim / 2);
        rope_row(qkv + r * qkv_columns, in.shape, layer.q_norm, layer.k_norm, in.eps, in.cosine + angle,
                 in.sine + angle, query + r * heads_pad, layer.k_plane + slot, layer.v_plane + slot,
                 head_scratch.data());
      });
      AttentionInput<T> attention = attention_input(in, layer.window, query, attended);
      attention.k = layer.k_plane;
      attention.v = layer.v_plane;
      attend(attention, plans[plan_of[static_cast<size_t>(l)]], partials, scratch, worker);
      const int64_t heads_dim = in.shape.heads * in.shape.dim;
      quantize_each(attended, heads_pad, heads_dim);
      product(layer.out, attended, heads_pad, heads_dim, rows, AddColumns{residual, hidden, hidden});
      normalise(layer.mlp_norm);
      product(layer.gate_up, normed, hidden_pad, hidden, rows, GateColumns<Gated>{gated, inter_pad, in.intermediate});
      quantize_each(gated, inter_pad, in.intermediate);
      product(layer.down, gated, inter_pad, in.intermediate, rows, AddColumns{residual, hidden, hidden});
      each_row(in.capture != nullptr ? rows : 0, [&](int64_t r) {
        convert_row(residual + r * hidden, hidden, in.capture + (l * rows + r) * hidden);
      });
    }
    each_row(in.logits_count, [&](int64_t i) {
      normalise_row(in.final_norm, in.logits_rows[i], i);
      if constexpr (int8) {
        convert_row(row_scratch.data(), hidden, in.hidden_out + i * hidden);
      } else {
        std::memcpy(in.hidden_out + i * hidden, normed + i * hidden_pad, static_cast<size_t>(hidden) * sizeof(T));
      }
    });
    product(in.head, normed, hidden_pad, hidden, in.logits_count, StoreColumns<float>{in.logits, in.vocab, in.vocab});
  });
}

}  // namespace truedraft
