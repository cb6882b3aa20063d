// Paged attention over block tables for packed rows.
//
// A row's context is cut into chunks of kChunk positions counted from absolute position 0. Each chunk has its own
// maximum and sum; chunks are merged in ascending order. Whether one thread walks the chunks or several do and the
// partial results are merged afterwards, the instructions a row's result goes through are the same. So neither the
// block size, nor the threads, nor the other rows can change a bit of it.
//
// K and V of a chunk are read once for all rows of a row block and all heads of a group: K is transposed to
// [step][position]. Positions outside a row's own range are masked out of the scores and never
// touched in the sum over V, so what lies in foreign or unwritten slots does not matter.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace truedraft {

constexpr int64_t kChunk = 64;      // positions
constexpr int64_t kRowBlock = 32;   // rows of a sequence that share one pass over K and V
constexpr int kHeadsTogether = 4;   // heads of a group whose sums stay in registers
constexpr int64_t kFewRows = 8;     // rows of a sequence: decoding, with or without drafts
constexpr int64_t kMostSplitRows = 64;  // of a batch, whose partial records are small beside K and V

template <typename T>
struct AttentionInput {
  const T* q;       // [rows, heads, d], row stride q_stride
  const T* k;       // [slots, kv_heads, d]
  const T* v;       // [slots, kv_heads, d]
  T* out;           // [rows, heads, d], row stride out_stride
  int64_t q_stride, out_stride;
  HeadShape shape;
  const int64_t* positions;  // [rows]
  const int32_t* row_starts;  // [sequences + 1]
  const int32_t* tables;     // [sequences, table_width]
  int64_t sequences, table_width, block_size;
  int64_t window;  // positions a row sees, its own included; 0: all
  float scale, softcap;  // softcap 0: none

  int64_t first_position(int64_t row) const {
    return window > 0 ? std::max<int64_t>(0, positions[row] - window + 1) : 0;
  }
};

// Rows [row_begin, row_end) of one sequence and the chunks [chunk_begin, chunk_end) that one of them needs.
struct RowBlock {
  int32_t sequence;
  int64_t row_begin, row_end, chunk_begin, chunk_end;
  int64_t partial_begin;  // index of the block's first partial record
};

// Some chunks of a block, for the heads of K and V in [kv_begin, kv_end).
struct AttentionTask {
  int32_t block;
  int64_t chunk_begin, chunk_end, kv_begin, kv_end;
};

// How the work is cut; the same for all layers with the same window. `split`: chunks go to separate tasks.
//
// The heads of a slot lie side by side. Where few rows look at much context, what counts is that memory is read as it
// lies: a task then has all heads. Where many rows share a chunk, what counts is that their sums stay in the cache.
struct AttentionPlan {
  std::vector<RowBlock> blocks;
  std::vector<AttentionTask> tasks;
  bool split = false;
  int64_t partials = 0;
};

// The positions that a block's rows see, from the first to the last.
template <typename T>
Range visible_range(const AttentionInput<T>& in, const RowBlock& block) {
  Range range{in.first_position(block.row_begin), in.positions[block.row_begin] + 1};
  for (int64_t row = block.row_begin + 1; row < block.row_end; ++row) {
    range.begin = std::min(range.begin, in.first_position(row));
    range.end = std::max(range.end, in.positions[row] + 1);
  }
  return range;
}

template <typename T>
AttentionPlan plan_attention(const AttentionInput<T>& in, int threads) {
  AttentionPlan plan;
  for (int64_t s = 0; s < in.sequences; ++s) {
    for (int64_t row = in.row_starts[s]; row < in.row_starts[s + 1]; row += kRowBlock) {
      const int64_t end = std::min<int64_t>(row + kRowBlock, in.row_starts[s + 1]);
      RowBlock block{static_cast<int32_t>(s), row, end, 0, 0, 0};
      const Range range = visible_range(in, block);
      block.chunk_begin = range.begin / kChunk;
      block.chunk_end = (range.end - 1) / kChunk + 1;
      plan.blocks.push_back(block);
    }
  }
  const auto blocks = static_cast<int64_t>(plan.blocks.size()), rows = int64_t{in.row_starts[in.sequences]};
  const bool few_rows = rows <= kFewRows * blocks, much_work = threads == 1 || blocks >= 4 * threads;
  const bool together = few_rows && (much_work || rows <= kMostSplitRows);
  plan.split = together ? !much_work : threads > 1 && blocks * in.shape.kv_heads < 6 * threads;
  for (size_t b = 0; b < plan.blocks.size(); ++b) {
    RowBlock& block = plan.blocks[b];
    const int64_t chunks = block.chunk_end - block.chunk_begin;
    if (plan.split) {
      block.partial_begin = plan.partials;
      plan.partials += chunks * (block.row_end - block.row_begin) * in.shape.heads;
    }
    const int64_t step = plan.split ? 1 : chunks, heads = together ? in.shape.kv_heads : 1;
    for (int64_t c = block.chunk_begin; c < block.chunk_end; c += step) {
      for (int64_t kv = 0; kv < in.shape.kv_heads; kv += heads) {
        plan.tasks.push_back({static_cast<int32_t>(b), c, c + step, kv, kv + heads});
      }
    }
  }
  return plan;
}

// A partial record: d sums (padded to 16), then the maximum, then the sum of weights.
inline int64_t partial_stride(int64_t d) { return round_up(d, 16) + 16; }

inline void merge_partial(float* state, const float* part, int64_t padded, bool first) {
  if (first) {
    std::memcpy(state, part, static_cast<size_t>(padded + 2) * sizeof(float));
    return;
  }
  const float m = std::max(state[padded], part[padded]);
  const float a = exp1(state[padded] - m), b = exp1(part[padded] - m);
  const __m512 va = _mm512_set1_ps(a), vb = _mm512_set1_ps(b);
  for (int64_t i = 0; i < padded; i += 16) {
    const __m512 scaled = _mm512_mul_ps(load16(part + i), vb);
    store16(state + i, _mm512_fmadd_ps(load16(state + i), va, scaled));
  }
  state[padded] = m;
  state[padded + 1] = __builtin_fmaf(state[padded + 1], a, part[padded + 1] * b);
}

template <typename T>
void finish_row(const float* state, int64_t d, int64_t padded, T* out) {
  const __m512 sum = _mm512_set1_ps(state[padded + 1]);
  for (int64_t i = 0; i < d; i += 16) store16(out + i, _mm512_div_ps(load16(state + i), sum), first_lanes(d - i));
}

// One thread's working memory.
template <typename T>
class AttentionScratch {
 public:
  void fit(const HeadShape& shape) {
    const int64_t d = shape.dim;
    steps = d / Word<T>::kWidth;
    padded = round_up(d, 16);
    keys.resize(static_cast<size_t>(round_up(steps, 16) * kChunk));
    weights.resize(kChunk * kHeadsTogether);
    states.resize(static_cast<size_t>(kRowBlock * shape.heads * partial_stride(d)));
    part.resize(static_cast<size_t>(kHeadsTogether * partial_stride(d)));
  }
  int64_t steps = 0, padded = 0;
  std::vector<uint32_t> keys;  // [steps][kChunk] words
  int64_t offsets[kChunk];     // of the chunk's positions, in elements of a plane: their first head
  int64_t ahead[kChunk];       // of those that will be read next
  const T *ahead_k = nullptr, *ahead_v = nullptr;  // of the head that is asked for at these; null: nothing is
  std::vector<float> weights;  // [kHeadsTogether][kChunk]
  std::vector<float> states;   // [rows of a block][heads][partial_stride]
  std::vector<float> part;     // [kHeadsTogether][partial_stride]
};

// The positions of chunk `c` that lie in `visible`, counted from the chunk's first.
inline Range inside_chunk(int64_t c, Range visible) {
  return {std::max<int64_t>(visible.begin - c * kChunk, 0), std::min<int64_t>(visible.end - c * kChunk, kChunk)};
}

// Element offsets of the positions `inside` of chunk `c` into the planes. The other lanes get a neighbour's: they are
// masked later.
template <typename T>
void find_slots(const AttentionInput<T>& in, int64_t sequence, int64_t c, Range inside, int64_t* offsets) {
  const int64_t slot_stride = in.shape.kv_heads * in.shape.dim, first = c * kChunk + inside.begin;
  const int32_t* table = in.tables + sequence * in.table_width;
  int64_t block = first / in.block_size, place = first % in.block_size;
  for (int64_t i = inside.begin; i < inside.end; ++i) {
    offsets[i] = (table[block] * in.block_size + place) * slot_stride;
    if (++place == in.block_size) {
      place = 0;
      ++block;
    }
  }
  std::fill(offsets, offsets + inside.begin, offsets[inside.begin]);
  std::fill(offsets + inside.end, offsets + kChunk, offsets[inside.end - 1]);
}

// Brings the keys of one head at the chunk's positions `inside` into scratch, transposed.
template <typename T>
void load_keys(const T* plane, Range inside, AttentionScratch<T>& s) {
  for (int64_t group = inside.begin / 16 * 16; group < inside.end; group += 16) {
    for (int64_t step = 0; step < s.steps; step += 16) {
      const __mmask16 mask = first_lanes(s.steps - step);
      __m512i r[16];
      for (int64_t i = 0; i < 16; ++i) {
        r[i] = _mm512_maskz_loadu_epi32(mask, plane + s.offsets[group + i] + step * Word<T>::kWidth);
      }
      transpose16(r);
      const int64_t count = std::min<int64_t>(16, s.steps - step);
      for (int64_t i = 0; i < count; ++i) {
        _mm512_storeu_si512(s.keys.data() + (step + i) * kChunk + group, r[i]);
      }
    }
  }
}

// Scores of H heads against the chunk's 64 keys -> weights[h][64] = exp(score - m); partial maximum and sum.
template <typename T, int H>
void chunk_weights(const AttentionInput<T>& in, const T* q, __mmask64 visible, AttentionScratch<T>& s) {
  const int64_t d = in.shape.dim;
  __m512 acc[H][4];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < 4; ++i) acc[h][i] = _mm512_setzero_ps();
  const uint32_t* keys = s.keys.data();
  for (int64_t step = 0; step < s.steps; ++step) {
    __m512i key[4];
    for (int i = 0; i < 4; ++i) key[i] = _mm512_loadu_si512(keys + step * kChunk + i * 16);
    for (int h = 0; h < H; ++h) {
      const __m512i word = broadcast_word(q + h * d + step * Word<T>::kWidth);
      for (int i = 0; i < 4; ++i) acc[h][i] = Word<T>::dot(acc[h][i], key[i], word);
    }
  }
  const __m512 lowest = _mm512_set1_ps(kNegInf);
  for (int h = 0; h < H; ++h) {
    for (int i = 0; i < 4; ++i) {
      __m512 score = _mm512_mul_ps(acc[h][i], _mm512_set1_ps(in.scale));
      if (in.softcap > 0) {
        const __m512 cap = _mm512_set1_ps(in.softcap);
        score = _mm512_mul_ps(tanh16(_mm512_div_ps(score, cap)), cap);
      }
      acc[h][i] = _mm512_mask_mov_ps(lowest, static_cast<__mmask16>(visible >> (16 * i)), score);
    }
    const float m = max_lanes(_mm512_max_ps(_mm512_max_ps(acc[h][0], acc[h][1]), _mm512_max_ps(acc[h][2], acc[h][3])));
    __m512 w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm512_maskz_mov_ps(static_cast<__mmask16>(visible >> (16 * i)),
                                 exp16(_mm512_sub_ps(acc[h][i], _mm512_set1_ps(m))));
      _mm512_storeu_ps(s.weights.data() + h * kChunk + i * 16, w[i]);
    }
    float* record = s.part.data() + h * partial_stride(d) + s.padded;
    record[0] = m;
    record[1] = sum_lanes(_mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3])));
  }
}

// Asks memory for K and V of position `i` of what will be read next. Little by little: many requests at once would
// hold up what is computed now.
template <typename T>
inline void look_ahead(int64_t i, int64_t d, const AttentionScratch<T>& s) {
  const char* k = reinterpret_cast<const char*>(s.ahead_k + s.ahead[i]);
  const char* v = reinterpret_cast<const char*>(s.ahead_v + s.ahead[i]);
  for (int64_t line = 0; line < d * static_cast<int64_t>(sizeof(T)); line += 64) {
    _mm_prefetch(k + line, _MM_HINT_T1);
    _mm_prefetch(v + line, _MM_HINT_T1);
  }
}

// part[h][j] = sum over positions [begin, end) of the chunk, ascending, of weights[h][i] * V[i][j], for N vectors of
// columns from `column` on. V is widened as it is read; unless Full, `tail` holds the lanes of the last vector.
template <typename T, int H, int N, bool Full>
void chunk_values_block(const T* plane, int64_t d, int64_t begin, int64_t end, int64_t column, __mmask16 tail,
                        AttentionScratch<T>& s) {
  const int64_t record = partial_stride(d);
  __m512 acc[H][N];
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n) acc[h][n] = _mm512_setzero_ps();
  const float* weights = s.weights.data();
  for (int64_t i = begin; i < end; ++i) {
    const T* row = plane + s.offsets[i] + column;
    if (column == 0 && s.ahead_k != nullptr) look_ahead(i, d, s);
    __m512 v[N];
    for (int n = 0; n + 1 < N; ++n) v[n] = load16(row + n * 16);
    v[N - 1] = Full ? load16(row + (N - 1) * 16) : load16(row + (N - 1) * 16, tail);
    for (int h = 0; h < H; ++h) {
      const __m512 w = _mm512_set1_ps(weights[h * kChunk + i]);
      for (int n = 0; n < N; ++n) acc[h][n] = _mm512_fmadd_ps(w, v[n], acc[h][n]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int n = 0; n < N; ++n) store16(s.part.data() + h * record + column + n * 16, acc[h][n]);
}

template <typename T, int H>
void chunk_values_tail(const T* plane, int64_t d, int64_t begin, int64_t end, int64_t column, int64_t vectors,
                       __mmask16 tail, AttentionScratch<T>& s) {
  switch (vectors) {
    case 1: chunk_values_block<T, H, 1, false>(plane, d, begin, end, column, tail, s); break;
    case 2: chunk_values_block<T, H, 2, false>(plane, d, begin, end, column, tail, s); break;
    case 3: chunk_values_block<T, H, 3, false>(plane, d, begin, end, column, tail, s); break;
    default: chunk_values_block<T, H, 4, false>(plane, d, begin, end, column, tail, s); break;
  }
}

template <typename T, int H>
void chunk_values(const AttentionInput<T>& in, const T* plane, int64_t begin, int64_t end, AttentionScratch<T>& s) {
  const int64_t d = in.shape.dim;
  for (int64_t column = 0; column < d; column += 64) {
    const int64_t left = std::min<int64_t>(64, d - column), vectors = (left + 15) / 16;
    const __mmask16 tail = first_lanes(left - (vectors - 1) * 16);
    switch (left) {
      case 64: chunk_values_block<T, H, 4, true>(plane, d, begin, end, column, tail, s); break;
      case 48: chunk_values_block<T, H, 3, true>(plane, d, begin, end, column, tail, s); break;
      case 32: chunk_values_block<T, H, 2, true>(plane, d, begin, end, column, tail, s); break;
      case 16: chunk_values_block<T, H, 1, true>(plane, d, begin, end, column, tail, s); break;
      default: chunk_values_tail<T, H>(plane, d, begin, end, column, vectors, tail, s);
    }
  }
}

template <typename T, int H>
void chunk_heads(const AttentionInput<T>& in, const T* q, const T* values, int64_t begin, int64_t end,
                 AttentionScratch<T>& s) {
  const __mmask64 upto = end >= 64 ? ~__mmask64(0) : (__mmask64(1) << end) - 1;
  const __mmask64 visible = upto & ~((__mmask64(1) << begin) - 1);
  chunk_weights<T, H>(in, q, visible, s);
  chunk_values<T, H>(in, values, begin, end, s);
}

// One head of K and V against the rows of a block, in chunk `c`, whose keys lie in scratch.
template <typename T>
void run_chunk(const AttentionInput<T>& in, const AttentionPlan& plan, const RowBlock& block, int64_t c,
               int64_t kv_head, float* partials, AttentionScratch<T>& s) {
  const int64_t d = in.shape.dim, heads = in.shape.heads, group = heads / in.shape.kv_heads;
  const int64_t stride = partial_stride(d), origin = c * kChunk, rows = block.row_end - block.row_begin;
  const T* values = in.v + kv_head * d;
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    const int64_t row_first = in.first_position(row);
    const int64_t begin = std::max<int64_t>(0, row_first - origin);
    const int64_t end = std::min<int64_t>(kChunk, in.positions[row] + 1 - origin);
    if (begin >= end) continue;
    for (int64_t g = 0; g < group; g += kHeadsTogether) {
      const int64_t count = std::min<int64_t>(kHeadsTogether, group - g);
      const int64_t head = kv_head * group + g;
      const T* q = in.q + row * in.q_stride + head * d;
      switch (count) {
        case 1: chunk_heads<T, 1>(in, q, values, begin, end, s); break;
        case 2: chunk_heads<T, 2>(in, q, values, begin, end, s); break;
        case 3: chunk_heads<T, 3>(in, q, values, begin, end, s); break;
        default: chunk_heads<T, 4>(in, q, values, begin, end, s); break;
      }
      s.ahead_k = nullptr;  // has been asked for
      for (int64_t h = 0; h < count; ++h) {
        const float* part = s.part.data() + h * stride;
        if (plan.split) {
          const int64_t index = ((c - block.chunk_begin) * rows + row - block.row_begin) * heads + head + h;
          std::memcpy(partials + (block.partial_begin + index) * stride, part,
                      static_cast<size_t>(s.padded + 2) * sizeof(float));
        } else {
          float* state = s.states.data() + ((row - block.row_begin) * heads + head + h) * stride;
          merge_partial(state, part, s.padded, c == row_first / kChunk);
        }
      }
    }
  }
}

// `then`: what this thread will probably do next, or null.
template <typename T>
void run_attention_task(const AttentionInput<T>& in, const AttentionPlan& plan, const AttentionTask& task,
                        const AttentionTask* then, float* partials, AttentionScratch<T>& s) {
  const RowBlock& block = plan.blocks[static_cast<size_t>(task.block)];
  const int64_t d = in.shape.dim, heads = in.shape.heads, group = heads / in.shape.kv_heads;
  const Range range = visible_range(in, block);
  const auto find = [&](const RowBlock& of, int64_t c, Range visible, int64_t* offsets) {
    const Range inside = inside_chunk(c, visible);
    find_slots(in, of.sequence, c, inside, offsets);
    return inside;
  };
  Range inside = find(block, task.chunk_begin, range, s.offsets), next{0, 0};
  for (int64_t c = task.chunk_begin; c < task.chunk_end; ++c) {
    const AttentionTask* ahead = c + 1 < task.chunk_end ? &task : then;
    if (ahead == &task) {
      next = find(block, c + 1, range, s.ahead);
    } else if (ahead != nullptr) {
      const RowBlock& other = plan.blocks[static_cast<size_t>(ahead->block)];
      find(other, ahead->chunk_begin, visible_range(in, other), s.ahead);
    }
    for (int64_t kv = task.kv_begin; kv < task.kv_end; ++kv) {
      load_keys(in.k + kv * d, inside, s);
      if (ahead != nullptr) {
        const int64_t head = ahead->kv_begin + kv - task.kv_begin;
        s.ahead_k = in.k + head * d;
        s.ahead_v = in.v + head * d;
      }
      run_chunk(in, plan, block, c, kv, partials, s);
    }
    inside = next;
    std::memcpy(s.offsets, s.ahead, sizeof(s.offsets));
  }
  if (plan.split) return;
  for (int64_t row = block.row_begin; row < block.row_end; ++row) {
    for (int64_t head = task.kv_begin * group; head < task.kv_end * group; ++head) {
      const float* state = s.states.data() + ((row - block.row_begin) * heads + head) * partial_stride(d);
      finish_row(state, d, s.padded, in.out + row * in.out_stride + head * d);
    }
  }
}

// Merges the partial records of `item` (a row of a block times a head) in chunk order. Split plans only.
template <typename T>
void merge_attention(const AttentionInput<T>& in, const RowBlock& block, int64_t row, float* partials) {
  const int64_t d = in.shape.dim, padded = round_up(d, 16), stride = partial_stride(d);
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t first = in.first_position(row) / kChunk, last = in.positions[row] / kChunk;
  for (int64_t head = 0; head < in.shape.heads; ++head) {
    auto record = [&](int64_t c) {
      const int64_t index = ((c - block.chunk_begin) * rows + row - block.row_begin) * in.shape.heads + head;
      return partials + (block.partial_begin + index) * stride;
    };
    float* state = record(first);
    for (int64_t c = first + 1; c <= last; ++c) merge_partial(state, record(c), padded, false);
    finish_row(state, d, padded, in.out + row * in.out_stride + head * d);
  }
}

constexpr int64_t kAttentionPhases = 2;

// All threads of a region call this together.
template <typename T>
void attend(const AttentionInput<T>& in, const AttentionPlan& plan, float* partials, AttentionScratch<T>& scratch,
            Worker& worker) {
  const auto total = static_cast<int64_t>(plan.tasks.size());
  worker.each(total, [&](int64_t i) {
    const int64_t likely = i + worker.threads();  // this thread's next task, if all go the same pace
    const AttentionTask* then = likely < total ? &plan.tasks[static_cast<size_t>(likely)] : nullptr;
    run_attention_task(in, plan, plan.tasks[static_cast<size_t>(i)], then, partials, scratch);
  });
  worker.each(plan.split ? static_cast<int64_t>(plan.blocks.size()) : 0, [&](int64_t b) {
    const RowBlock& block = plan.blocks[static_cast<size_t>(b)];
    for (int64_t row = block.row_begin; row < block.row_end; ++row) merge_attention(in, block, row, partials);
  });
}

}  // namespace truedraft
