// Registration of the kernels as torch operations (namespace truedraft). This file alone includes torch headers.
// The dispatcher releases the GIL before it calls any of these.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>
#include <torch/library.h>

#include "pieces.h"
#include "sampling.h"
#include "stack.h"

namespace truedraft {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

template <typename T>
constexpr at::ScalarType scalar_type() {
  return std::is_same_v<T, float> ? at::kFloat : at::kBFloat16;
}

template <typename T>
T* data_of(const Tensor& t, const char* name) {
  constexpr at::ScalarType expected = std::is_same_v<T, float>     ? at::kFloat
                                      : std::is_same_v<T, bf16>    ? at::kBFloat16
                                      : std::is_same_v<T, int32_t> ? at::kInt
                                      : std::is_same_v<T, int8_t>  ? at::kChar
                                      : std::is_same_v<T, double>  ? at::kDouble
                                                                   : at::kLong;
  TORCH_CHECK(t.scalar_type() == expected, name, " must be ", expected, ", got ", t.scalar_type());
  TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  return static_cast<T*>(t.data_ptr());
}

template <typename T>
const T* maybe_data(const MaybeTensor& t, const char* name) {
  return t.has_value() && t->numel() > 0 ? data_of<T>(*t, name) : nullptr;
}

// Calls body with a value of the element type.
template <typename Body>
auto with_type(const Tensor& t, const char* name, Body body) {
  if (t.scalar_type() == at::kBFloat16) return body(bf16{});
  TORCH_CHECK(t.scalar_type() == at::kFloat, name, " must be bfloat16 or float32, got ", t.scalar_type());
  return body(float{});
}

template <typename T>
PackedWeight<T> packed(const Tensor& w, const float* bias) {
  TORCH_CHECK(w.dim() == 3 && w.size(2) == kTileColumns * Word<T>::kWidth, "packed weight must be [tiles, steps, ",
              kTileColumns * Word<T>::kWidth, "], got ", w.sizes());
  return {data_of<T>(w, "packed weight"), bias, w.size(0), w.size(1)};
}

// Of its [data, bias, scales], empty where it has none.
template <typename W>
PackedWeight<W> packed(const Tensor* parts) {
  PackedWeight<W> weight = packed<W>(parts[0], maybe_data<float>(parts[1], "bias"));
  const int64_t columns = weight.tiles * kTileColumns;
  TORCH_CHECK(weight.bias == nullptr || parts[1].numel() == columns, "bias must be padded to whole tiles");
  if constexpr (std::is_same_v<W, int8_t>) {
    weight.scales = data_of<float>(parts[2], "scales");
    TORCH_CHECK(parts[2].numel() == columns, "scales must be padded to whole tiles");
  }
  return weight;
}

int checked_threads(int64_t threads) {
  TORCH_CHECK(threads >= 1 && threads <= 1024, "threads must be in 1..1024, got ", threads);
  return static_cast<int>(threads);
}

void check_range(const Tensor& t, int64_t limit, const char* name) {
  const int64_t* p = data_of<int64_t>(t, name);
  for (int64_t i = 0; i < t.numel(); ++i) {
    TORCH_CHECK(p[i] >= 0 && p[i] < limit, name, "[", i, "] = ", p[i], " is outside 0..", limit - 1);
  }
}

// Memory for packed weights: asks for huge pages, which must happen before it is first written.
Tensor empty_weights(int64_t elements, at::ScalarType type) {
  Tensor t = at::empty({elements}, at::TensorOptions().dtype(type));
  const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t page = 4096, first = (begin + page - 1) / page * page, last = (begin + t.nbytes()) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return t;
}

void pack_weight_op(const Tensor& weight, const Tensor& order, Tensor out) {
  auto pack = [&](auto tag) {
    using T = decltype(tag);
    TORCH_CHECK(weight.dim() == 2, "weight must be [n, k], got ", weight.sizes());
    const int64_t k = weight.size(1);
    const PackedWeight<T> target = packed<T>(out, nullptr);
    TORCH_CHECK(target.steps == (k + Word<T>::kWidth - 1) / Word<T>::kWidth && order.numel() == target.tiles * kTileColumns,
                "packed weight ", out.sizes(), " does not fit weight ", weight.sizes());
    const int64_t* source = data_of<int64_t>(order, "order");
    for (int64_t i = 0; i < order.numel(); ++i) {
      TORCH_CHECK(source[i] >= -1 && source[i] < weight.size(0), "order[", i, "] = ", source[i], " is no row of ", weight.sizes());
    }
    T* const written = const_cast<T*>(target.data);
    if constexpr (std::is_same_v<T, int8_t>) {
      Int8Pieces::pack(data_of<T>(weight, "weight"), k, source, target.tiles, written);
    } else {
      Pieces<T>::pack(data_of<T>(weight, "weight"), k, source, target.tiles, written);
    }
  };
  if (weight.scalar_type() == at::kChar) return pack(int8_t{});
  with_type(weight, "weight", pack);
}

std::tuple<Tensor, Tensor, Tensor> quantize_rows_op(const Tensor& rows) {
  TORCH_CHECK(rows.dim() == 2, "rows must be [count, k], got ", rows.sizes());
  const int64_t padded = round_up(rows.size(1), Word<int8_t>::kWidth), groups = group_count(rows.size(1));
  Tensor values = at::empty({rows.size(0), padded}, at::TensorOptions().dtype(at::kChar));
  Tensor scales = at::empty({rows.size(0), groups}, at::TensorOptions().dtype(at::kFloat));
  Tensor offsets = at::empty({rows.size(0), groups}, at::TensorOptions().dtype(at::kInt));
  with_type(rows, "rows", [&](auto tag) {
    using T = decltype(tag);
    Int8Pieces::quantize<T>(data_of<T>(rows, "rows"), rows.size(0), rows.size(1), padded, values.data_ptr<int8_t>(),
                            scales.data_ptr<float>(), offsets.data_ptr<int32_t>());
  });
  return {values, scales, offsets};
}

Tensor int8_matmul_op(const Tensor& values, const Tensor& scales, const Tensor& offsets, at::TensorList weight,
                      int64_t columns, int64_t threads) {
  TORCH_CHECK(values.dim() == 2, "values must be [count, k], got ", values.sizes());
  const int64_t groups = group_count(values.size(1));
  for (const Tensor* t : {&scales, &offsets}) {
    TORCH_CHECK(t->dim() == 2 && t->size(0) == values.size(0) && t->size(1) == groups, "scales and offsets must be [count, ", groups, "], got ", t->sizes());
  }
  TORCH_CHECK(weight.size() == 3, "a weight is [data, bias, scales]");
  const PackedWeight<int8_t> w = packed<int8_t>(&weight[0]);
  TORCH_CHECK(values.size(1) == w.steps * Word<int8_t>::kWidth, "values ", values.sizes(), " do not fit a weight of ", w.steps, " steps");
  TORCH_CHECK(columns > (w.tiles - 1) * kTileColumns && columns <= w.tiles * kTileColumns, "columns ", columns, " do not fit ", w.tiles, " tiles");
  Tensor out = at::empty({values.size(0), columns}, at::TensorOptions().dtype(at::kFloat));
  const MatmulRows<int8_t> rows{data_of<int8_t>(values, "values"), values.size(1), data_of<float>(scales, "scales"),
                                data_of<int32_t>(offsets, "offsets"), groups};
  Int8Pieces::matmul(w, rows, values.size(0), columns, out.data_ptr<float>(), checked_threads(threads));
  return out;
}

// Rows as the kernels want them: padded with zeros to whole words.
template <typename T>
std::pair<const T*, int64_t> word_rows(const Tensor& rows, int64_t steps, std::vector<T>& storage) {
  const int64_t k = rows.size(1), padded = steps * Word<T>::kWidth;
  TORCH_CHECK(k <= padded && k > padded - Word<T>::kWidth, "rows ", rows.sizes(), " do not fit a weight of ", steps, " steps");
  TORCH_CHECK(rows.stride(1) == 1 || k == 1, "rows must be contiguous along k");
  TORCH_CHECK(rows.scalar_type() == scalar_type<T>(), "rows must be ", scalar_type<T>(), ", got ", rows.scalar_type());
  const T* data = static_cast<const T*>(rows.data_ptr());
  if (k == padded) return {data, rows.stride(0)};
  storage.assign(static_cast<size_t>(rows.size(0) * padded), T(0));
  for (int64_t r = 0; r < rows.size(0); ++r) std::copy_n(data + r * rows.stride(0), k, storage.data() + r * padded);
  return {storage.data(), padded};
}

Tensor matmul_op(const Tensor& rows, const Tensor& weight, const MaybeTensor& bias, int64_t columns, int64_t threads) {
  TORCH_CHECK(rows.dim() == 2, "rows must be [count, k], got ", rows.sizes());
  Tensor out = at::empty({rows.size(0), columns}, at::TensorOptions().dtype(at::kFloat));
  with_type(weight, "packed weight", [&](auto tag) {
    using T = decltype(tag);
    std::vector<T> storage;
    const PackedWeight<T> w = packed<T>(weight, maybe_data<float>(bias, "bias"));
    TORCH_CHECK(columns > (w.tiles - 1) * kTileColumns && columns <= w.tiles * kTileColumns, "columns ", columns, " do not fit ", w.tiles, " tiles");
    TORCH_CHECK(w.bias == nullptr || bias->numel() == w.tiles * kTileColumns, "bias must be padded to whole tiles");
    const auto [data, stride] = word_rows<T>(rows, w.steps, storage);
    Pieces<T>::matmul(w, data, stride, rows.size(0), columns, out.data_ptr<float>(), checked_threads(threads));
  });
  return out;
}

Tensor gated_matmul_op(const Tensor& rows, const Tensor& weight, const MaybeTensor& bias, int64_t columns, int64_t threads) {
  TORCH_CHECK(rows.dim() == 2, "rows must be [count, k], got ", rows.sizes());
  Tensor out = at::empty({rows.size(0), columns}, weight.options());
  with_type(weight, "packed weight", [&](auto tag) {
    using T = decltype(tag);
    std::vector<T> storage;
    const PackedWeight<T> w = packed<T>(weight, maybe_data<float>(bias, "bias"));
    TORCH_CHECK(columns > (w.tiles - 1) * 16 && columns <= w.tiles * 16, "columns ", columns, " do not fit ", w.tiles, " tiles");
    TORCH_CHECK(w.bias == nullptr || bias->numel() == w.tiles * kTileColumns, "bias must be padded to whole tiles");
    const auto [data, stride] = word_rows<T>(rows, w.steps, storage);
    Pieces<T>::gated(w, data, stride, rows.size(0), columns, data_of<T>(out, "out"), checked_threads(threads));
  });
  return out;
}

Tensor rms_norm_op(const Tensor& x, const Tensor& weight, double eps, at::ScalarType type) {
  TORCH_CHECK(x.dim() == 2 && weight.numel() == x.size(1), "rms_norm: rows ", x.sizes(), " against weight ", weight.sizes());
  Tensor out = at::empty(x.sizes(), at::TensorOptions().dtype(type));
  with_type(out, "out", [&](auto tag) {
    using T = decltype(tag);
    Pieces<T>::norm(data_of<float>(x, "x"), data_of<float>(weight, "weight"), x.size(0), x.size(1), static_cast<float>(eps),
                    data_of<T>(out, "out"));
  });
  return out;
}

HeadShape head_shape(int64_t columns, const Tensor& plane) {
  TORCH_CHECK(plane.dim() == 3, "a K or V plane must be [slots, kv_heads, d], got ", plane.sizes());
  const int64_t kv_heads = plane.size(1), d = plane.size(2);
  TORCH_CHECK(d > 0 && d % 2 == 0 && columns % d == 0, "head size ", d, " must be even and divide ", columns);
  const int64_t heads = columns / d;
  TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, heads, " heads do not group over ", kv_heads, " K/V heads");
  return {heads, kv_heads, d};
}

Tensor rope_write_op(const Tensor& qkv, const MaybeTensor& q_norm, const MaybeTensor& k_norm, double eps, const Tensor& cosine,
                     const Tensor& sine, const Tensor& positions, const Tensor& slots, Tensor k_plane, Tensor v_plane) {
  TORCH_CHECK(qkv.dim() == 2, "qkv must be [rows, columns], got ", qkv.sizes());
  const HeadShape shape = head_shape(qkv.size(1) - 2 * k_plane.size(1) * k_plane.size(2), k_plane);
  TORCH_CHECK(positions.numel() == qkv.size(0) && slots.numel() == qkv.size(0), "one position and one slot a row");
  check_range(positions, cosine.size(0), "positions");
  check_range(slots, k_plane.size(0), "slots");
  Tensor query = at::empty({qkv.size(0), shape.heads, shape.dim}, k_plane.options());
  with_type(k_plane, "k_plane", [&](auto tag) {
    using T = decltype(tag);
    Pieces<T>::rope(data_of<float>(qkv, "qkv"), qkv.size(0), shape, maybe_data<float>(q_norm, "q_norm"),
                    maybe_data<float>(k_norm, "k_norm"), static_cast<float>(eps), data_of<float>(cosine, "cosine"),
                    data_of<float>(sine, "sine"), data_of<int64_t>(positions, "positions"), data_of<int64_t>(slots, "slots"),
                    data_of<T>(query, "query"), data_of<T>(k_plane, "k_plane"), data_of<T>(v_plane, "v_plane"));
  });
  return query;
}

// Every block that a row needs must lie inside the plane; entries behind are never read.
void check_tables(const Tensor& positions, const Tensor& row_starts, const Tensor& tables, int64_t block_size, int64_t slots) {
  TORCH_CHECK(block_size > 0, "block_size must be positive, got ", block_size);
  TORCH_CHECK(tables.dim() == 2 && row_starts.numel() == tables.size(0) + 1, "row_starts ", row_starts.sizes(), " against block_tables ", tables.sizes());
  const int64_t* position = data_of<int64_t>(positions, "positions");
  const int32_t* starts = data_of<int32_t>(row_starts, "row_starts");
  const int32_t* table = data_of<int32_t>(tables, "block_tables");
  const int64_t width = tables.size(1), blocks = slots / block_size;
  TORCH_CHECK(starts[0] == 0 && starts[tables.size(0)] == positions.numel(), "row_starts must run from 0 to ", positions.numel());
  for (int64_t s = 0; s < tables.size(0); ++s) {
    TORCH_CHECK(starts[s] <= starts[s + 1], "row_starts must not fall");
    int64_t last = -1;
    for (int64_t row = starts[s]; row < starts[s + 1]; ++row) last = std::max(last, position[row]);
    TORCH_CHECK(last < width * block_size, "position ", last, " lies outside ", width, " blocks of ", block_size);
    for (int64_t b = 0; b * block_size <= last; ++b) {
      const int32_t block = table[s * width + b];
      TORCH_CHECK(block >= 0 && block < blocks, "block_tables[", s, "][", b, "] = ", block, " is outside 0..", blocks - 1);
    }
  }
}

Tensor paged_attention_op(const Tensor& query, const Tensor& k_plane, const Tensor& v_plane, const Tensor& positions,
                          const Tensor& row_starts, const Tensor& tables, int64_t block_size, int64_t window, double scale,
                          double softcap, int64_t threads) {
  TORCH_CHECK(query.dim() == 3 && query.size(0) == positions.numel(), "query must be [rows, heads, d], got ", query.sizes());
  check_range(positions, std::numeric_limits<int32_t>::max(), "positions");
  check_tables(positions, row_starts, tables, block_size, k_plane.size(0));
  Tensor out = at::empty(query.sizes(), query.options());
  with_type(query, "query", [&](auto tag) {
    using T = decltype(tag);
    AttentionInput<T> in{};
    in.shape = head_shape(query.size(1) * query.size(2), k_plane);
    in.q = data_of<T>(query, "query");
    in.k = data_of<T>(k_plane, "k_plane");
    in.v = data_of<T>(v_plane, "v_plane");
    in.out = data_of<T>(out, "out");
    in.q_stride = in.out_stride = query.size(1) * query.size(2);
    in.positions = data_of<int64_t>(positions, "positions");
    in.row_starts = data_of<int32_t>(row_starts, "row_starts");
    in.tables = data_of<int32_t>(tables, "block_tables");
    in.sequences = tables.size(0);
    in.table_width = tables.size(1);
    in.block_size = block_size;
    in.window = window;
    in.scale = static_cast<float>(scale);
    in.softcap = static_cast<float>(softcap);
    Pieces<T>::attention(in, checked_threads(threads));
  });
  return out;
}

// Of a layer, in the order read below: four products of [data, bias, scales], then four norms.
constexpr size_t kProductTensors = 3, kLayerTensors = 4 * kProductTensors + 4;

std::tuple<Tensor, Tensor, Tensor> decoder_stack_op(
    const Tensor& input_ids, const Tensor& positions, const Tensor& slots, const Tensor& row_starts, const Tensor& tables,
    const Tensor& logits_rows, int64_t block_size, const Tensor& embedding, at::TensorList layers, const Tensor& final_norm,
    at::TensorList head, const Tensor& cosine, const Tensor& sine, at::TensorList planes, at::IntArrayRef windows,
    int64_t heads, int64_t intermediate, int64_t vocab, double eps, double scale, int64_t threads, bool capture) {
  const size_t depth = windows.size();
  TORCH_CHECK(layers.size() == depth * kLayerTensors && planes.size() == depth * 2, "decoder_stack: ", depth, " layers need ",
              depth * kLayerTensors, " weights and ", depth * 2, " planes, got ", layers.size(), " and ", planes.size());
  TORCH_CHECK(depth > 0, "decoder_stack needs at least one layer");
  const int64_t rows = input_ids.numel(), hidden = embedding.size(1), wanted = logits_rows.numel();
  TORCH_CHECK(positions.numel() == rows && slots.numel() == rows, "one position and one slot a row");
  check_range(input_ids, embedding.size(0), "input_ids");
  check_range(positions, cosine.size(0), "positions");
  check_range(slots, planes[0].size(0), "slots");
  check_range(logits_rows, rows, "logits_rows");
  check_tables(positions, row_starts, tables, block_size, planes[0].size(0));

  Tensor logits = at::empty({wanted, vocab}, at::TensorOptions().dtype(at::kFloat));
  Tensor hidden_out = at::empty({wanted, hidden}, embedding.options());
  Tensor captured = at::empty({capture ? static_cast<int64_t>(depth) : 0, rows, hidden}, logits.options());
  TORCH_CHECK(head.size() == kProductTensors, "the head is [data, bias, scales]");
  auto run = [&](auto tag, auto weight_tag) {
    using T = decltype(tag);
    using W = decltype(weight_tag);
    StackInput<T, W> in{};
    for (size_t l = 0; l < depth; ++l) {
      const Tensor* w = &layers[l * kLayerTensors];
      auto product = [&](size_t i) { return packed<W>(w + i * kProductTensors); };
      auto norm = [&](size_t i) { return maybe_data<float>(w[4 * kProductTensors + i], "norm"); };
      in.layers.push_back({norm(0), product(0), norm(1), norm(2), product(1), norm(3), product(2), product(3),
                           data_of<T>(planes[2 * l], "k plane"), data_of<T>(planes[2 * l + 1], "v plane"), windows[l]});
    }
    in.embedding = data_of<T>(embedding, "embedding");
    in.final_norm = data_of<float>(final_norm, "final_norm");
    in.head = packed<W>(&head[0]);
    in.shape = head_shape(heads * planes[0].size(2), planes[0]);
    in.hidden = hidden;
    in.intermediate = intermediate;
    in.vocab = vocab;
    in.eps = static_cast<float>(eps);
    in.scale = static_cast<float>(scale);
    in.softcap = 0.0f;
    in.input_ids = data_of<int64_t>(input_ids, "input_ids");
    in.positions = data_of<int64_t>(positions, "positions");
    in.slots = data_of<int64_t>(slots, "slot_mapping");
    in.row_starts = data_of<int32_t>(row_starts, "row_starts");
    in.block_tables = data_of<int32_t>(tables, "block_tables");
    in.logits_rows = data_of<int64_t>(logits_rows, "logits_rows");
    in.cosine = data_of<float>(cosine, "cosine");
    in.sine = data_of<float>(sine, "sine");
    in.rows = rows;
    in.sequences = tables.size(0);
    in.table_width = tables.size(1);
    in.block_size = block_size;
    in.logits_count = wanted;
    in.logits = logits.data_ptr<float>();
    in.hidden_out = data_of<T>(hidden_out, "hidden");
    in.capture = capture ? captured.data_ptr<float>() : nullptr;
    run_stack(in, checked_threads(threads));
  };
  with_type(embedding, "embedding", [&](auto tag) {
    if (head[0].scalar_type() == at::kChar) return run(tag, int8_t{});
    run(tag, tag);
  });
  return {logits, hidden_out, captured};
}

Tensor argmax_rows_op(const Tensor& logits, int64_t threads) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits must be [rows, vocab], got ", logits.sizes());
  Tensor out = at::empty({logits.size(0)}, at::TensorOptions().dtype(at::kLong));
  argmax_rows(data_of<float>(logits, "logits"), logits.size(0), logits.size(1), out.data_ptr<int64_t>(), checked_threads(threads));
  return out;
}

Tensor logsumexp_rows_op(const Tensor& logits, int64_t threads) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits must be [rows, vocab], got ", logits.sizes());
  Tensor out = at::empty({logits.size(0)}, at::TensorOptions().dtype(at::kDouble));
  logsumexp_rows(data_of<float>(logits, "logits"), logits.size(0), logits.size(1), out.data_ptr<double>(), checked_threads(threads));
  return out;
}

Tensor keyed_sample_rows_op(const Tensor& logits, const Tensor& temperature, const Tensor& min_p, const Tensor& top_k,
                            const Tensor& top_p, const Tensor& seeds, const Tensor& steps, int64_t threads) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits must be [rows, vocab], got ", logits.sizes());
  const int64_t rows = logits.size(0);
  for (const Tensor* t : {&temperature, &min_p, &top_k, &top_p, &seeds, &steps}) {
    TORCH_CHECK(t->numel() == rows, "keyed_sample_rows needs one value a row (", rows, "), got ", t->numel());
  }
  Tensor out = at::empty({rows}, at::TensorOptions().dtype(at::kLong));
  const SampleInput in{data_of<float>(logits, "logits"), data_of<double>(temperature, "temperature"), data_of<double>(min_p, "min_p"),
                       data_of<int64_t>(top_k, "top_k"), data_of<double>(top_p, "top_p"), data_of<int64_t>(seeds, "seeds"),
                       data_of<int64_t>(steps, "steps"), rows, logits.size(1)};
  for (int64_t r = 0; r < rows; ++r) TORCH_CHECK(in.temperature[r] > 0, "temperature[", r, "] must be positive, got ", in.temperature[r]);
  keyed_sample_rows(in, out.data_ptr<int64_t>(), checked_threads(threads));
  return out;
}

Tensor keyed_uniforms_op(int64_t seed, int64_t step, int64_t count) {
  TORCH_CHECK(count >= 0, "count must not be negative, got ", count);
  Tensor out = at::empty({count}, at::TensorOptions().dtype(at::kDouble));
  keyed_uniforms(seed, step, count, out.data_ptr<double>());
  return out;
}

}  // namespace
}  // namespace truedraft

TORCH_LIBRARY(truedraft, m) {
  m.def("empty_weights(int elements, ScalarType dtype) -> Tensor", &truedraft::empty_weights);
  m.def("pack_weight(Tensor weight, Tensor order, Tensor(a!) out) -> ()");
  m.def("matmul(Tensor rows, Tensor weight, Tensor? bias, int columns, int threads) -> Tensor");
  m.def("quantize_rows(Tensor rows) -> (Tensor, Tensor, Tensor)");
  m.def("int8_matmul(Tensor values, Tensor scales, Tensor offsets, Tensor[] weight, int columns, int threads) -> Tensor");
  m.def("gated_matmul(Tensor rows, Tensor weight, Tensor? bias, int columns, int threads) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, ScalarType dtype) -> Tensor");
  m.def(
      "rope_write(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cosine, Tensor sine, Tensor positions, "
      "Tensor slots, Tensor(a!) k_plane, Tensor(b!) v_plane) -> Tensor");
  m.def(
      "paged_attention(Tensor query, Tensor k_plane, Tensor v_plane, Tensor positions, Tensor row_starts, "
      "Tensor block_tables, int block_size, int window, float scale, float softcap, int threads) -> Tensor");
  m.def(
      "decoder_stack(Tensor input_ids, Tensor positions, Tensor slots, Tensor row_starts, Tensor block_tables, "
      "Tensor logits_rows, int block_size, Tensor embedding, Tensor[] layers, Tensor final_norm, Tensor[] head, "
      "Tensor cosine, Tensor sine, Tensor(a!)[] planes, int[] windows, int heads, int intermediate, int vocab, "
      "float eps, float scale, int threads, bool capture) -> (Tensor, Tensor, Tensor)");
  m.def("argmax_rows(Tensor logits, int threads) -> Tensor");
  m.def("logsumexp_rows(Tensor logits, int threads) -> Tensor");
  m.def(
      "keyed_sample_rows(Tensor logits, Tensor temperature, Tensor min_p, Tensor top_k, Tensor top_p, Tensor seeds, "
      "Tensor steps, int threads) -> Tensor");
  m.def("keyed_uniforms(int seed, int step, int count) -> Tensor", &truedraft::keyed_uniforms_op);
}

TORCH_LIBRARY_IMPL(truedraft, CPU, m) {
  m.impl("pack_weight", &truedraft::pack_weight_op);
  m.impl("matmul", &truedraft::matmul_op);
  m.impl("quantize_rows", &truedraft::quantize_rows_op);
  m.impl("int8_matmul", &truedraft::int8_matmul_op);
  m.impl("gated_matmul", &truedraft::gated_matmul_op);
  m.impl("rms_norm", &truedraft::rms_norm_op);
  m.impl("rope_write", &truedraft::rope_write_op);
  m.impl("paged_attention", &truedraft::paged_attention_op);
  m.impl("decoder_stack", &truedraft::decoder_stack_op);
  m.impl("argmax_rows", &truedraft::argmax_rows_op);
  m.impl("logsumexp_rows", &truedraft::logsumexp_rows_op);
  m.impl("keyed_sample_rows", &truedraft::keyed_sample_rows_op);
}
