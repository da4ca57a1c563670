/* SPDX-License-Identifier: MIT */
/* kvprim as operators of PyTorch: torch.ops.kvprim.gather, store, transfer, copy and slots, on torch's current stream.

   12_torch_ops.py builds this with torch's cpp_extension beside a .cu file of two lines that implements kvprim, gives
   each operator its fake function for torch.compile, and tests all of it. Torch 2.8 or newer.

   Rules that hold for every operator here
       Tensors    Tables come from shapes and strides. `layout` says what the first dimensions are:
                      "rows"  [rows, ...]             a row is everything after the first dimension: a token, or a page
                      "NHD"   [pages, page, ...]      row r is [r / page, r % page]
                      "HND"   [pages, heads, page, ...]   row r is [r / page, :, r % page]
                  A row may be packed or lie in equal pieces at equal distances, as in a permuted view. Everything else
                  is refused, and so are expanded dimensions. Indices are int32 or int64, with any stride.
       Elements   Where dtypes differ, elements are converted, as kvprim.h says: k of bfloat16 into a cache of
                  float8_e4m3fn. cache_dtype says what a cache of uint8 holds:
                      "fp8" or "fp8_e4m3", "fp8_e5m2", "int8"
                      "fp8_per_token_head", "int8_per_token_head"     with a scale cache; the least scale is 1e-6
                      "fp8_ds_mla", "fp8_ds_mla_sglang" [.., 656], "fp8_ds_mla_v4" [.., 584], "fp8_indexer",
                      "fp8_indexer_ue8m0" [.., 132]
                  The last are whole formats, caches of "NHD" or "rows" that hold their scales. A row of k is what the
                  format quantises, and of v what it copies; or k is both in one row, and v None.
       Scales     A scale is a float32 tensor: of one element, or [heads]. It is read when the kernel runs, so a graph's
                  replay takes its new value. A scale cache has a float32 (or float8_e8m0fnu) for each tile of each row:
                  [rows, tiles], [pages, page, tiles] or, with "HND", [pages, heads, page]. A store writes it.
       Device     All tensors lie on one GPU, or all on the CPU, where kvprim's host functions do the same. transfer and
                  copy also take pinned tensors beside those of a GPU, and transfer index lists of the CPU.
       Errors     RuntimeError, which names the argument; nothing has been written. What kvprim refuses has
                  kvprim_last_error()'s text.
       Stream     An operator only enqueues, and CUDA graphs capture it. Only gather_new and slots_new allocate, by
                  torch's allocator, which is told of all uses of pinned tensors, so that they may be dropped at once.
                  As with torch's own operators, the caller uses record_stream() if the stream is not the one that a
                  tensor was allocated on, and keeps what a graph reads, pinned tensors too, as long as the graph.
       Gradients  None. */
#include "kvprim_cuda.cuh"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace
{
using at::Tensor;
using MaybeTensor = const std::optional<Tensor> &;
using Text = c10::string_view;

/* ---- errors ---- */

std::string text_of(Text text)
{
    return std::string(text);
}

std::string text_of(int64_t number)
{
    return std::to_string(number);
}

std::string text_of(at::ScalarType dtype)
{
    return c10::toString(dtype);
}

std::string text_of(c10::Device device)
{
    return device.str();
}

std::string text_of(at::IntArrayRef numbers)
{
    std::string text;
    for (const int64_t number : numbers)
        text += (text.empty() ? "" : ", ") + std::to_string(number);
    return "[" + text + "]";
}

/* Throws a RuntimeError. Not by TORCH_CHECK, which writes numbers to a stream in this library: that crashes if the
   compiler links a libstdc++ of its own into it, as some are set up to. */
template <class... Parts> [[noreturn]] void refuse(const Parts &...parts)
{
    C10_THROW_ERROR(Error, (text_of(parts) + ...));
}

#define EXPECT(holds, ...)                                                                                             \
    do                                                                                                                 \
        if (C10_UNLIKELY(!(holds)))                                                                                    \
            refuse(__VA_ARGS__);                                                                                       \
    while (0)

/* ---- tensors as kvprim sees them ---- */

enum class Layout { rows, nhd, hnd };

Layout layout_of(const char *name, Text text)
{
    if (text == "rows")
        return Layout::rows;
    EXPECT(text == "NHD" || text == "HND", name, " is \"", text, "\", not \"rows\", \"NHD\" or \"HND\"");
    return text == "NHD" ? Layout::nhd : Layout::hnd;
}

/* Sizes and strides, in elements, of a tensor whose page's rows come before its heads. */
struct Shape {
    static constexpr int64_t most = 8;
    int64_t dims, size[most], stride[most], elements; // elements: up to and including the last

    Shape(const char *name, const Tensor &tensor, Layout layout) : dims(tensor.dim()), elements(1)
    {
        const int64_t fewest = layout == Layout::rows ? 1 : layout == Layout::nhd ? 2 : 3;
        EXPECT(dims >= fewest && dims <= most, name, " has ", dims, " dimensions, but its layout needs ", fewest,
               " to ", most);
        for (int64_t d = 0; d < dims; d++) {
            size[d] = tensor.sizes()[d], stride[d] = tensor.strides()[d];
            EXPECT(size[d] <= 1 || stride[d] > 0, name, " is expanded in dimension ", d, ", as its strides ",
                   tensor.strides(), " say; make it contiguous");
            elements += (size[d] - 1) * stride[d];
        }
        if (layout == Layout::hnd)
            std::swap(size[1], size[2]), std::swap(stride[1], stride[2]);
    }

    /* Merges dimensions that lie `step` elements apart, from d downwards. Returns how many pieces that gives. */
    int64_t merge(int64_t &d, int64_t begin, int64_t step) const
    {
        int64_t pieces = 1;
        for (; d >= begin && (size[d] == 1 || stride[d] == pieces * step); d--)
            pieces *= size[d];
        return pieces;
    }
};

struct Rows {
    kvprim_table table = {};
    int64_t bytes = 0, elements = 0; // of a row
};

Rows rows_of(const char *name, const Tensor &tensor, Layout layout = Layout::rows)
{
    const Shape shape(name, tensor, layout);
    const int64_t begin = layout == Layout::rows ? 1 : 2, element = static_cast<int64_t>(tensor.itemsize());
    Rows rows;
    if (tensor.numel() == 0)
        return rows;
    int64_t d = shape.dims - 1;
    const int64_t piece = shape.merge(d, begin, 1), step = d >= begin ? shape.stride[d] : 0;
    const int64_t heads = shape.merge(d, begin, step);
    EXPECT(d < begin && heads <= INT32_MAX, name, " has sizes ", tensor.sizes(), " and strides ", tensor.strides(),
           ": its rows neither are packed nor lie in equal pieces at equal distances");
    rows.table.data = tensor.data_ptr();
    rows.table.rows = shape.size[0] * (begin == 2 ? shape.size[1] : 1);
    rows.table.stride = shape.size[begin - 1] > 1 ? shape.stride[begin - 1] * element : 0;
    rows.table.page_rows = begin == 2 ? shape.size[1] : 0;
    rows.table.page_stride = begin == 2 && shape.size[0] > 1 ? shape.stride[0] * element : 0;
    rows.table.heads = static_cast<int32_t>(heads);
    rows.table.head_stride = heads > 1 ? step * element : 0;
    rows.table.bytes = shape.elements * element;
    rows.elements = heads * piece;
    rows.bytes = rows.elements * element;
    return rows;
}

struct Index {
    const void *data = nullptr;
    kvprim_index_type type = {};
    int64_t stride = 0, count = 0;
};

Index index_of(const char *name, const Tensor &tensor)
{
    const auto dtype = tensor.scalar_type();
    EXPECT(dtype == at::kInt || dtype == at::kLong, name, " is ", dtype, ", not int32 or int64");
    EXPECT(tensor.dim() == 1, name, " has ", tensor.dim(), " dimensions, not 1");
    const int64_t count = tensor.numel(), stride = count > 1 ? tensor.strides()[0] : 1;
    EXPECT(stride > 0, name, " is expanded; make it contiguous");
    return {tensor.data_ptr(), dtype == at::kInt ? KVPRIM_I32 : KVPRIM_I64, stride, count};
}

/* ---- calls ---- */

/* A call of kvprim on one device, the CPU or a GPU. The GPU is the current one while this lives. */
class Call
{
    c10::Device device;
    c10::cuda::OptionalCUDAGuard guard;
    kvprim_cuda_launch launch = {};

  public:
    explicit Call(c10::Device on, bool pdl = false, int64_t max_sms = 0) : device(on)
    {
        EXPECT(on.is_cpu() || on.is_cuda(), "kvprim has no operators for ", on);
        if (on.is_cpu())
            return;
        guard.set_device(on);
        launch.stream = c10::cuda::getCurrentCUDAStream(on.index());
        launch.pdl = pdl;
        launch.max_sms = static_cast<int32_t>(std::clamp<int64_t>(max_sms, -1, INT32_MAX));
    }

    bool on_gpu() const
    {
        return device.is_cuda();
    }

    void move(const kvprim_move *moves, size_t n) const
    {
        expect(on_gpu() ? kvprim_cuda_move(moves, n, &launch) : kvprim_cpu_move(moves, n));
    }

    static void expect(kvprim_status status)
    {
        EXPECT(status == KVPRIM_OK, kvprim_status_name(status), ": ", kvprim_last_error());
    }

    void takes(const char *name, const Tensor &tensor) const
    {
        EXPECT(tensor.device() == device, name, " is on ", tensor.device(), ", but this call runs on ", device);
    }

    /* Tells torch's allocator of pinned memory which stream uses the tensor, as torch's own copies do. Otherwise it
       hands the memory out again as soon as the tensor is dropped, before the GPU has read it. */
    void takes_pinned(const char *name, const Tensor &tensor) const
    {
        if (!on_gpu() || !tensor.is_cpu() || tensor.numel() == 0)
            return takes_unless_empty(name, tensor);
        const c10::DataPtr &memory = tensor.storage().data_ptr();
        const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
        if (!at::getHostAllocator(at::kCUDA)->record_event(memory.get(), memory.get_context(), stream))
            EXPECT(tensor.is_pinned(), name, " is in pageable memory, which ", device,
                   " does not reach; use pin_memory()");
    }

    uint32_t *counter(MaybeTensor rejected) const
    {
        if (!rejected)
            return nullptr;
        takes("rejected", *rejected);
        EXPECT(rejected->numel() == 1 && rejected->itemsize() == 4 && !rejected->is_floating_point(), "rejected is ",
               rejected->scalar_type(), " of ", rejected->numel(), " elements, not one int32");
        return static_cast<uint32_t *>(rejected->data_ptr());
    }

    template <class Desc>
    void run(kvprim_status (*cpu)(const Desc *), kvprim_status (*gpu)(const Desc *, const kvprim_cuda_launch *),
             const Desc &desc) const
    {
        expect(on_gpu() ? gpu(&desc, &launch) : cpu(&desc));
    }

  private:
    void takes_unless_empty(const char *name, const Tensor &tensor) const
    {
        if (tensor.numel() != 0)
            takes(name, tensor);
    }
};

/* ---- element types ---- */

struct DtypeName {
    Text name;
    kvprim_dtype dtype;
    bool per_token_head; // computes its scales as vLLM does
};

constexpr DtypeName dtype_names[] = {{"fp8", KVPRIM_F8E4M3, false},
                                     {"fp8_e4m3", KVPRIM_F8E4M3, false},
                                     {"fp8_e5m2", KVPRIM_F8E5M2, false},
                                     {"int8", KVPRIM_INT8, false},
                                     {"fp8_per_token_head", KVPRIM_F8E4M3, true},
                                     {"int8_per_token_head", KVPRIM_INT8, true}};

struct PresetName {
    Text name;
    int64_t token_bytes; // of a page, divided by its tokens
};

constexpr PresetName preset_names[] = {{"fp8_ds_mla", 656},
                                       {"fp8_ds_mla_sglang", 656},
                                       {"fp8_ds_mla_v4", 584},
                                       {"fp8_indexer", 132},
                                       {"fp8_indexer_ue8m0", 132}};

template <class Names> const Names *find(const Names *begin, const Names *end, Text name)
{
    for (; begin != end; begin++)
        if (begin->name == name)
            return begin;
    return nullptr;
}

const PresetName *preset_named(Text cache_dtype)
{
    return find(std::begin(preset_names), std::end(preset_names), cache_dtype);
}

kvprim_dtype dtype_of(const char *name, at::ScalarType dtype)
{
    switch (dtype) {
    case at::kHalf:
        return KVPRIM_F16;
    case at::kBFloat16:
        return KVPRIM_BF16;
    case at::kFloat:
        return KVPRIM_F32;
    case at::kChar:
        return KVPRIM_INT8;
    case at::kFloat8_e4m3fn:
        return KVPRIM_F8E4M3;
    case at::kFloat8_e5m2:
        return KVPRIM_F8E5M2;
    default:
        refuse(name, " is ", dtype, ", which is no element type that kvprim converts; cache_dtype says what uint8 is");
    }
}

/* The format of a tensor's elements, without a scale. */
kvprim_format format_of(const char *name, const Tensor &tensor, Text dtype)
{
    kvprim_format format = {};
    if (dtype == "auto") {
        format.dtype = dtype_of(name, tensor.scalar_type());
        return format;
    }
    const DtypeName *const named = find(std::begin(dtype_names), std::end(dtype_names), dtype);
    EXPECT(named, "the dtype of ", name, " is \"", dtype,
           "\", not \"auto\", \"fp8\", \"fp8_e4m3\", \"fp8_e5m2\", \"int8\", \"fp8_per_token_head\", "
           "\"int8_per_token_head\", \"fp8_ds_mla\", \"fp8_ds_mla_sglang\", \"fp8_ds_mla_v4\", \"fp8_indexer\" or "
           "\"fp8_indexer_ue8m0\"");
    EXPECT(tensor.scalar_type() == at::kByte || dtype_of(name, tensor.scalar_type()) == named->dtype, name, " is ",
           tensor.scalar_type(), ", which does not hold \"", dtype, "\"");
    format.dtype = named->dtype;
    format.scale_inverse = named->per_token_head;
    format.scale_min = named->per_token_head ? 1e-6f : 0;
    return format;
}

/* A scale for all, or for each head: [], [1] or [heads]. A transfer has `layers`: for more than one of them [layers] in
   place of [heads], and [layers, heads]. It is read. */
void set_scale(kvprim_format &format, const Call &call, const char *name, const Tensor &scale, int64_t elements,
               int64_t layers = 0)
{
    call.takes(name, scale);
    EXPECT(scale.scalar_type() == at::kFloat, name, " is ", scale.scalar_type(), ", not float32");
    const int64_t dims = scale.dim(), each = layers > 0 && (dims == 2 || (layers > 1 && scale.numel() > 1));
    const int64_t heads = dims > each ? scale.size(dims - 1) : 1;
    EXPECT(dims <= 1 + each && heads > 0 && (!each || scale.size(0) == layers), name, " has shape ", scale.sizes(),
           layers > 0 ? ", not one element, [layers] or [layers, heads]" : ", not one element or [heads]");
    EXPECT(elements % heads == 0, name, " has ", heads, " elements, but a row ", elements, ": not as many for each");
    format.scale = heads > 1 ? KVPRIM_SCALE_HEAD : KVPRIM_SCALE_TENSOR;
    format.tile = heads > 1 ? elements / heads : 0;
    format.scales = scale.data_ptr();
    format.scale_tile_stride = heads > 1 ? scale.stride(dims - 1) * 4 : 0;
    format.scale_layer_stride = layers == 1 ? 0 : each ? scale.stride(0) * 4 : KVPRIM_SCALES_SHARED;
    EXPECT((heads == 1 || format.scale_tile_stride > 0) && (!each || layers == 1 || scale.stride(0) > 0), name,
           " is expanded; make it contiguous");
}

/* A scale for each tile of each row of a cache, in memory of their own or between its rows. */
void set_scale_cache(kvprim_format &format, const Call &call, const char *name, const Tensor &scales, Layout layout,
                     kvprim_table &table, int64_t elements)
{
    call.takes(name, scales);
    const bool power = scales.scalar_type() == at::kFloat8_e8m0fnu;
    EXPECT(power || scales.scalar_type() == at::kFloat, name, " is ", scales.scalar_type(),
           ", not float32 or float8_e8m0fnu");
    const Shape shape(name, scales, layout);
    const int64_t begin = layout == Layout::rows ? 1 : 2, size = power ? 1 : 4, tiles = shape.size[shape.dims - 1];
    const int64_t page_rows = begin == 2 ? table.page_rows : 1;
    EXPECT(shape.dims == begin + 1 && tiles > 0 && shape.size[0] * page_rows == table.rows &&
               (begin == 1 || shape.size[1] == page_rows),
           name, " has shape ", scales.sizes(), ", which does not fit its cache's ", table.rows, " rows");
    EXPECT(elements % tiles == 0, name, " has ", tiles, " scales in a row, but its cache ", elements,
           " elements: not as many for each");
    format.scale = KVPRIM_SCALE_TILE;
    format.scale_dtype = power ? KVPRIM_F8E8M0 : KVPRIM_F32;
    format.tile = elements / tiles;
    format.scale_tile_stride = tiles > 1 ? shape.stride[begin] * size : 0;
    format.scale_stride = shape.size[begin - 1] > 1 ? shape.stride[begin - 1] * size : 0;
    format.scale_page_stride = begin == 2 && shape.size[0] > 1 ? shape.stride[0] * size : 0;
    char *const at = static_cast<char *>(scales.data_ptr()), *const cache = static_cast<char *>(table.data);
    if (at < cache || at >= cache + table.bytes) {
        format.scales = at;
        return;
    }
    format.scale_offset = at - cache;
    table.bytes = std::max(table.bytes, format.scale_offset + shape.elements * size);
}

/* Whether a call converts. If so, rows of both sides have as many elements; otherwise one dtype, and as many bytes. */
bool converts(const char *a_name, const Tensor &a, const Rows &a_rows, const char *b_name, const Tensor &b,
              const Rows &b_rows, bool asked)
{
    if (!asked && a.scalar_type() == b.scalar_type()) {
        EXPECT(a_rows.bytes == b_rows.bytes || a.numel() == 0 || b.numel() == 0, "a row of ", a_name, " has ",
               a_rows.bytes, " bytes, but one of ", b_name, " ", b_rows.bytes);
        return false;
    }
    EXPECT(a_rows.elements == b_rows.elements || a.numel() == 0 || b.numel() == 0, "a row of ", a_name, " has ",
           a_rows.elements, " elements, but one of ", b_name, " ", b_rows.elements);
    return true;
}

/* Bytes of a row, as src has them. One of the tensors may be empty. */
int64_t row_bytes(const Rows &dst, const Rows &src, const Tensor &src_tensor)
{
    return std::max(dst.elements, src.elements) * static_cast<int64_t>(src_tensor.itemsize());
}

/* A cache in a whole format: the tables of what it quantises (K) and of what it copies (V). */
void find_preset(kvprim_preset &preset, const PresetName &named, const char *name, const Tensor &cache, Layout layout)
{
    const int64_t dims = layout == Layout::rows ? 2 : 3, page_rows = dims == 3 && cache.dim() == 3 ? cache.size(1) : 1;
    EXPECT(layout != Layout::hnd && cache.dim() == dims && cache.itemsize() == 1 &&
               cache.size(dims - 1) == named.token_bytes && cache.stride(dims - 1) == 1 &&
               (dims == 2 || page_rows == 1 || cache.stride(1) == named.token_bytes),
           name, " is ", cache.scalar_type(), " of shape ", cache.sizes(), " and strides ", cache.strides(), ", but ",
           named.name, " needs uint8 [pages, page, ", named.token_bytes, "] (\"NHD\") or [rows, ", named.token_bytes,
           "] (\"rows\") with packed pages");
    char *const data = static_cast<char *>(cache.data_ptr());
    Call::expect(kvprim_preset_find(std::string(named.name).c_str(), data, cache.size(0) * page_rows, page_rows,
                                    cache.size(0) > 1 ? cache.stride(0) : 0, &preset));
    const int64_t bytes = (cache.size(0) - 1) * cache.stride(0) + page_rows * named.token_bytes;
    for (kvprim_table *const table : {&preset.k_cache, &preset.v_cache})
        if (table->data)
            table->bytes = bytes - (static_cast<char *>(table->data) - data);
}

/* Rows of k with what a preset quantises, of v with what it copies, or of k with both. */
struct Parts {
    Rows k, v;
    kvprim_format k_format = {};

    Parts(const kvprim_preset &preset, const char *k_name, const Tensor &k_tensor, const char *v_name,
          MaybeTensor v_tensor)
        : k(rows_of(k_name, k_tensor))
    {
        const int64_t size = static_cast<int64_t>(k_tensor.itemsize());
        k_format = format_of(k_name, k_tensor, "auto");
        EXPECT(preset.v_elements == 0 || size == 2, k_name, " is ", k_tensor.scalar_type(),
               ", but this format copies 16-bit elements");
        EXPECT(k.elements == preset.k_elements || k_tensor.numel() == 0 ||
                   (!v_tensor && k.elements == preset.k_elements + preset.v_elements),
               "a row of ", k_name, " has ", k.elements, " elements, but this format ", preset.k_elements, " and ",
               preset.v_elements);
        if (v_tensor) {
            v = rows_of(v_name, *v_tensor);
            EXPECT(v_tensor->itemsize() == 2 && (v.elements == preset.v_elements || v_tensor->numel() == 0),
                   "a row of ", v_name, " has ", v.elements, " elements of ", v_tensor->scalar_type(),
                   ", but this format copies ", preset.v_elements, " 16-bit ones");
        } else if (k.elements > preset.k_elements) {
            EXPECT(k.table.heads <= 1, k_name, " has rows in pieces; make it contiguous");
            v = k;
            v.table.data = static_cast<char *>(k.table.data) + preset.k_elements * size;
            v.table.stride = k.table.stride ? k.table.stride : k.bytes;
            k.table.stride = v.table.stride;
            v.table.bytes -= preset.k_elements * size;
            v.elements = preset.v_elements, v.bytes = v.elements * size;
        }
        k.elements = preset.k_elements, k.bytes = k.elements * size;
        k.table.format = &k_format;
    }
    Parts(const Parts &) = delete;
};

/* ---- gather and store ---- */

void gather_preset(const Call &call, const PresetName &named, const Tensor &out, const Tensor &src, const Index &rows,
                   Layout layout, int64_t base, uint32_t *rejected)
{
    kvprim_preset preset = {};
    find_preset(preset, named, "src", src, layout);
    const Parts to(preset, "out", out, nullptr, std::nullopt);
    kvprim_gather_desc desc = {};
    desc.dst = to.k.table, desc.src = preset.k_cache, desc.row_bytes = preset.k_elements;
    desc.index = rows.data, desc.index_type = rows.type, desc.index_stride = rows.stride;
    desc.index_base = base, desc.count = rows.count, desc.rejected = rejected;
    kvprim_move moves[2];
    Call::expect(kvprim_gather_moves(&desc, &moves[0]));
    if (to.v.bytes) {
        desc.dst = to.v.table, desc.src = preset.v_cache, desc.row_bytes = to.v.bytes, desc.rejected = nullptr;
        Call::expect(kvprim_gather_moves(&desc, &moves[1]));
    }
    call.move(moves, to.v.bytes ? 2 : 1);
}

void gather(const Tensor &out, const Tensor &src, const Tensor &index, Text layout_name, Text cache_dtype,
            MaybeTensor scale, int64_t base, MaybeTensor rejected, bool pdl)
{
    const Call call(out.device(), pdl);
    call.takes("src", src);
    call.takes("index", index);
    const Layout layout = layout_of("layout", layout_name);
    const Index rows = index_of("index", index);
    if (const PresetName *const named = preset_named(cache_dtype)) {
        EXPECT(!scale, "scale is given, but ", cache_dtype, " holds its own");
        return gather_preset(call, *named, out, src, rows, layout, base, call.counter(rejected));
    }
    const Rows to = rows_of("out", out), from = rows_of("src", src, layout);
    kvprim_gather_desc desc = {};
    kvprim_format formats[2];
    desc.dst = to.table, desc.src = from.table, desc.row_bytes = row_bytes(to, from, src);
    if (converts("out", out, to, "src", src, from, cache_dtype != "auto" || scale)) {
        formats[0] = format_of("out", out, "auto"), formats[1] = format_of("src", src, cache_dtype);
        formats[1].scale_inverse = 0;
        EXPECT(scale || !formats[1].scale_min, cache_dtype, " needs scale, the scale cache");
        if (scale && scale->dim() < 2)
            set_scale(formats[1], call, "scale", *scale, from.elements);
        else if (scale)
            set_scale_cache(formats[1], call, "scale", *scale, layout, desc.src, from.elements);
        desc.dst.format = &formats[0], desc.src.format = &formats[1];
    }
    desc.index = rows.data, desc.index_type = rows.type, desc.index_stride = rows.stride;
    desc.index_base = base, desc.count = rows.count, desc.rejected = call.counter(rejected);
    call.run(kvprim_gather, kvprim_cuda_gather, desc);
}

/* For the GPU without torch's dispatcher, which takes a microsecond more. */
Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device)
{
    if (!device.is_cuda())
        return at::empty(sizes, at::TensorOptions(dtype).device(device));
    return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
}

Tensor gather_new(const Tensor &src, const Tensor &index, Text layout, Text cache_dtype, MaybeTensor scale,
                  std::optional<at::ScalarType> dtype, int64_t base, bool pdl)
{
    const Layout rows = layout_of("layout", layout);
    const at::IntArrayRef sizes = src.sizes();
    const size_t begin = rows == Layout::rows ? 1 : rows == Layout::nhd ? 2 : 3;
    EXPECT(sizes.size() >= begin, "src has ", sizes.size(), " dimensions, but its layout needs ", begin);
    EXPECT(dtype || (cache_dtype == "auto" && !scale), "dtype must say what a converting gather returns");
    c10::SmallVector<int64_t, Shape::most> shape = {index.numel()};
    if (const PresetName *const named = preset_named(cache_dtype)) {
        kvprim_preset preset = {};
        find_preset(preset, *named, "src", src, rows);
        shape.push_back(preset.k_elements + preset.v_elements);
    } else {
        if (rows == Layout::hnd)
            shape.push_back(sizes[1]);
        shape.append(sizes.begin() + begin, sizes.end());
    }
    const Tensor out = empty(shape, dtype.value_or(src.scalar_type()), src.device());
    gather(out, src, index, layout, cache_dtype, scale, base, std::nullopt, pdl);
    return out;
}

/* Where a store finds and puts K, or V. */
struct StoreSide {
    const char *name, *cache_name, *scale_name, *scale_cache_name;
    const Tensor &rows, &cache;
    MaybeTensor scale, scale_cache;
    kvprim_format formats[2] = {};

    /* Fills in the tables of rows and cache, and the bytes of a row. */
    void describe(const Call &call, Layout layout, Text cache_dtype, bool inverse, kvprim_table &from_table,
                  kvprim_table &to_table, int64_t &bytes)
    {
        call.takes(name, rows);
        call.takes(cache_name, cache);
        const Rows from = rows_of(name, rows), to = rows_of(cache_name, cache, layout);
        from_table = from.table, to_table = to.table, bytes = from.bytes;
        const bool asked = cache_dtype != "auto" || scale || scale_cache;
        if (!converts(name, rows, from, cache_name, cache, to, asked))
            return;
        formats[0] = format_of(name, rows, "auto"), formats[1] = format_of(cache_name, cache, cache_dtype);
        EXPECT(!scale || !scale_cache, scale_name, " and ", scale_cache_name, " are both given");
        EXPECT(scale_cache || !formats[1].scale_min, cache_dtype, " needs ", scale_cache_name);
        formats[1].scale_inverse |= inverse;
        if (scale)
            set_scale(formats[1], call, scale_name, *scale, to.elements);
        if (scale_cache)
            set_scale_cache(formats[1], call, scale_cache_name, *scale_cache, layout, to_table, to.elements);
        from_table.format = &formats[0], to_table.format = &formats[1];
    }
};

/* K's and V's part of a cache that holds both, in a dimension of size 2 or beside each other in the last. */
std::pair<Tensor, Tensor> parts_of(const Tensor &cache, int64_t kv_dim, const Tensor &k)
{
    const int64_t dims = cache.dim(), d = kv_dim < 0 ? kv_dim + dims : kv_dim, k_size = k.dim() ? k.size(-1) : 0;
    const bool cut = d == dims - 1;
    EXPECT(d >= 0 && d < dims && (cut ? k_size <= cache.size(d) : cache.size(d) == 2), "kv_dim is ", kv_dim,
           ", but k_cache has shape ", cache.sizes(), ": not 2 there, nor K's elements before V's in the last");
    if (cut)
        return {cache.narrow(d, 0, k_size), cache.narrow(d, k_size, cache.size(d) - k_size)};
    return {cache.select(d, 0), cache.select(d, 1)};
}

void store(const Tensor &k, MaybeTensor v, const Tensor &k_cache, MaybeTensor v_cache, const Tensor &slot,
           Text layout_name, Text cache_dtype, std::optional<int64_t> kv_dim, MaybeTensor k_scale, MaybeTensor v_scale,
           MaybeTensor k_scale_cache, MaybeTensor v_scale_cache, bool scale_inverse, int64_t base, MaybeTensor rejected,
           bool pdl)
{
    if (kv_dim) {
        EXPECT(v && !v_cache, "kv_dim says that k_cache holds K and V, so v must be a tensor and v_cache None");
        const auto [k_part, v_part] = parts_of(k_cache, *kv_dim, k);
        return store(k, v, k_part, v_part, slot, layout_name, cache_dtype, std::nullopt, k_scale, v_scale,
                     k_scale_cache, v_scale_cache, scale_inverse, base, rejected, pdl);
    }
    const Call call(k_cache.device(), pdl);
    const Layout layout = layout_of("layout", layout_name);
    const PresetName *const named = preset_named(cache_dtype);
    call.takes("slot", slot);
    const Index slots = index_of("slot", slot);
    kvprim_store_desc desc = {};
    desc.slot = slots.data, desc.slot_type = slots.type, desc.slot_stride = slots.stride;
    desc.slot_base = base, desc.count = slots.count, desc.rejected = call.counter(rejected);
    if (named) {
        EXPECT(!v_cache && !k_scale && !v_scale && !k_scale_cache && !v_scale_cache && !scale_inverse, cache_dtype,
               " takes neither v_cache nor scales: k_cache holds all of it");
        call.takes("k", k);
        if (v)
            call.takes("v", *v);
        kvprim_preset preset = {};
        find_preset(preset, *named, "k_cache", k_cache, layout);
        EXPECT(preset.v_elements != 0 || !v, cache_dtype, " has no v");
        const Parts from(preset, "k", k, "v", v);
        EXPECT(preset.v_elements == 0 || from.v.table.data || k.numel() == 0, "v is None, but a row of k has only ",
               preset.k_elements, " elements");
        desc.k = from.k.table, desc.k_cache = preset.k_cache, desc.k_bytes = from.k.bytes;
        if (from.v.table.data)
            desc.v = from.v.table, desc.v_cache = preset.v_cache, desc.v_bytes = from.v.bytes;
        return call.run(kvprim_store, kvprim_cuda_store, desc);
    }
    EXPECT(v.has_value() == v_cache.has_value(), "v and v_cache must both be tensors or both be None");
    EXPECT(v || (!v_scale && !v_scale_cache), "v_scale or v_scale_cache is given, but v is None");
    StoreSide k_side = {"k", "k_cache", "k_scale", "k_scale_cache", k, k_cache, k_scale, k_scale_cache};
    k_side.describe(call, layout, cache_dtype, scale_inverse, desc.k, desc.k_cache, desc.k_bytes);
    if (!v)
        return call.run(kvprim_store, kvprim_cuda_store, desc);
    StoreSide v_side = {"v", "v_cache", "v_scale", "v_scale_cache", *v, *v_cache, v_scale, v_scale_cache};
    v_side.describe(call, layout, cache_dtype, scale_inverse, desc.v, desc.v_cache, desc.v_bytes);
    call.run(kvprim_store, kvprim_cuda_store, desc);
}

/* ---- transfer ---- */

/* One side of a transfer: the geometry of its layers, and where they start. */
struct Side {
    Rows rows;
    c10::SmallVector<void *, 128> pointers;
    void *const *device_pointers = nullptr;
    int64_t layers = 0;
};

Side side_of(const Call &call, const char *name, at::TensorList tensors, const char *layout_name, Text layout,
             const char *table_name, MaybeTensor table)
{
    EXPECT(!tensors.empty(), name, " has no tensors");
    const Tensor &first = tensors[0];
    Side side = {rows_of(name, first, layout_of(layout_name, layout)), {}, nullptr, 0};
    side.layers = static_cast<int64_t>(tensors.size());
    for (const Tensor &tensor : tensors) {
        call.takes_pinned(name, tensor);
        EXPECT(tensor.sizes() == first.sizes() && tensor.strides() == first.strides() &&
                   tensor.scalar_type() == first.scalar_type(),
               name, " holds layers of different shapes, strides or dtypes");
        side.pointers.push_back(tensor.data_ptr());
    }
    if (table) {
        call.takes(table_name, *table);
        EXPECT(table->itemsize() == 8 && !table->is_floating_point() && table->dim() == 1 && table->is_contiguous(),
               table_name, " is ", table->scalar_type(), " of shape ", table->sizes(),
               ", not packed pointers as uint64 or int64");
        EXPECT(table->numel() > 0 && (side.layers == 1 || side.layers == table->numel()), name, " has ", side.layers,
               " tensors, but ", table_name, " ", table->numel(), " pointers");
        side.device_pointers = static_cast<void *const *>(table->data_ptr());
        side.layers = table->numel();
    }
    return side;
}

/* Sets the indices of both sides. Those in the CPU's memory are read before the call returns. */
void set_indices(kvprim_transfer_desc &desc, const Call &call, MaybeTensor dst, MaybeTensor src)
{
    const Index to = dst ? index_of("dst_index", *dst) : Index(), from = src ? index_of("src_index", *src) : Index();
    EXPECT(!dst || !src || to.count == from.count, "dst_index has ", to.count, " elements, but src_index ", from.count);
    EXPECT(!dst || !src || dst->device() == src->device(), "dst_index is on ", dst->device(), ", but src_index on ",
           src->device());
    const bool on_cpu = (dst && dst->is_cpu()) || (src && src->is_cpu());
    if (!on_cpu && dst)
        call.takes("dst_index", *dst);
    if (!on_cpu && src)
        call.takes("src_index", *src);
    desc.host_index = on_cpu;
    desc.dst_index = to.data, desc.dst_index_type = to.type, desc.dst_index_stride = to.stride;
    desc.src_index = from.data, desc.src_index_type = from.type, desc.src_index_stride = from.stride;
    desc.count = dst ? to.count : src ? from.count : desc.src.rows;
}

c10::Device gpu_of(at::TensorList dst, at::TensorList src, MaybeTensor dst_layers, MaybeTensor src_layers)
{
    for (const MaybeTensor table : {dst_layers, src_layers})
        if (table)
            return table->device();
    for (const at::TensorList tensors : {dst, src})
        if (!tensors.empty() && tensors[0].is_cuda())
            return tensors[0].device();
    return c10::kCPU;
}

void transfer(at::TensorList dst, at::TensorList src, MaybeTensor dst_index, MaybeTensor src_index, Text dst_layout,
              Text src_layout, MaybeTensor dst_layers, MaybeTensor src_layers, bool same_cache, int64_t max_sms,
              MaybeTensor rejected, Text dst_dtype, Text src_dtype, MaybeTensor dst_scale, MaybeTensor src_scale)
{
    const Call call(gpu_of(dst, src, dst_layers, src_layers), false, max_sms);
    const Side to = side_of(call, "dst", dst, "dst_layout", dst_layout, "dst_layers", dst_layers);
    const Side from = side_of(call, "src", src, "src_layout", src_layout, "src_layers", src_layers);
    EXPECT(to.layers == from.layers, "dst has ", to.layers, " layers, but src ", from.layers);
    kvprim_transfer_desc desc = {};
    kvprim_format formats[2];
    desc.dst = to.rows.table, desc.src = from.rows.table, desc.row_bytes = row_bytes(to.rows, from.rows, src[0]);
    const bool asked = dst_dtype != "auto" || src_dtype != "auto" || dst_scale || src_scale;
    if (converts("dst", dst[0], to.rows, "src", src[0], from.rows, asked)) {
        formats[0] = format_of("dst", dst[0], dst_dtype), formats[1] = format_of("src", src[0], src_dtype);
        EXPECT(!formats[0].scale_min && !formats[1].scale_min, "transfer has no scale caches");
        if (dst_scale)
            set_scale(formats[0], call, "dst_scale", *dst_scale, to.rows.elements, to.layers);
        if (src_scale)
            set_scale(formats[1], call, "src_scale", *src_scale, from.rows.elements, from.layers);
        desc.dst.format = &formats[0], desc.src.format = &formats[1];
    }
    desc.dst_layers = to.device_pointers ? nullptr : to.pointers.data();
    desc.src_layers = from.device_pointers ? nullptr : from.pointers.data();
    desc.dst_device_layers = to.device_pointers, desc.src_device_layers = from.device_pointers;
    desc.layers = static_cast<int32_t>(std::min<int64_t>(to.layers, INT32_MAX));
    desc.same_cache = same_cache;
    desc.rejected = call.counter(rejected);
    set_indices(desc, call, dst_index, src_index);
    call.run(kvprim_transfer, kvprim_cuda_transfer, desc);
}

/* ---- copy ---- */

/* Whether the tensors' elements lie in the same order, without gaps. */
bool same_order(const Tensor &a, const Tensor &b)
{
    return a.sizes() == b.sizes() && ((a.is_contiguous() && b.is_contiguous()) ||
                                      (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

void copy(at::TensorList dst, at::TensorList src)
{
    EXPECT(dst.size() == src.size(), "dst has ", dst.size(), " tensors, but src ", src.size());
    c10::Device device = c10::kCPU;
    for (size_t i = 0; i < dst.size() && device.is_cpu(); i++)
        device = dst[i].is_cpu() ? src[i].device() : dst[i].device();
    const Call call(device);
    c10::SmallVector<kvprim_copy_item, 64> items;
    items.reserve(dst.size());
    for (size_t i = 0; i < dst.size(); i++) {
        call.takes_pinned("dst", dst[i]);
        call.takes_pinned("src", src[i]);
        EXPECT(dst[i].scalar_type() == src[i].scalar_type() && same_order(dst[i], src[i]), "dst[", i, "] is ",
               dst[i].scalar_type(), " ", dst[i].sizes(), " with strides ", dst[i].strides(), ", but src[", i, "] ",
               src[i].scalar_type(), " ", src[i].sizes(), " with strides ", src[i].strides());
        EXPECT(src[i].numel() == 0 || src[i].data_ptr(), "src[", i, "] has no memory"); // NULL stands for zeros
        items.push_back({src[i].data_ptr(), dst[i].data_ptr(), static_cast<uint64_t>(dst[i].nbytes())});
    }
    kvprim_copy_desc desc = {};
    desc.items = items.data(), desc.count = items.size();
    call.run(kvprim_copy, kvprim_cuda_copy, desc);
}

/* ---- slots ---- */

/* An optional array of one token type, checked against the others. */
const void *tokens_of(const Call &call, const char *name, MaybeTensor tensor, int64_t count, kvprim_index_type &type)
{
    if (!tensor)
        return nullptr;
    call.takes(name, *tensor);
    const Index tokens = index_of(name, *tensor);
    EXPECT(tokens.stride == 1, name, " has stride ", tokens.stride, ", not 1");
    EXPECT(tokens.count == count, name, " has ", tokens.count, " elements, not ", count);
    EXPECT(type == 0 || type == tokens.type, name, " is ", tensor->scalar_type(), ", but another argument is not");
    type = tokens.type;
    return tokens.data;
}

void slots(const Tensor &slot, const Tensor &pages, int64_t page_rows, int64_t rows, MaybeTensor request,
           MaybeTensor position, MaybeTensor cu_seqlens, MaybeTensor starts, MaybeTensor rejected, bool pdl)
{
    const Call call(slot.device(), pdl);
    call.takes("pages", pages);
    const Index to = index_of("slot", slot);
    EXPECT(to.stride == 1, "slot has stride ", to.stride, ", not 1");
    EXPECT(pages.dim() == 2 && (pages.size(1) <= 1 || pages.stride(1) == 1) &&
               (pages.size(0) <= 1 || pages.stride(0) > 0),
           "pages has shape ", pages.sizes(), " and strides ", pages.strides(),
           ", not [requests, pages] with packed rows");
    EXPECT(pages.scalar_type() == at::kInt || pages.scalar_type() == at::kLong, "pages is ", pages.scalar_type(),
           ", not int32 or int64");
    kvprim_slots_desc desc = {};
    desc.pages = pages.data_ptr(), desc.pages_type = pages.scalar_type() == at::kInt ? KVPRIM_I32 : KVPRIM_I64;
    desc.requests = pages.size(0), desc.max_pages = pages.size(1);
    desc.pages_stride = pages.size(0) > 1 ? pages.stride(0) : 0;
    desc.page_rows = page_rows, desc.rows = rows;
    kvprim_index_type type = {};
    desc.request = tokens_of(call, "request", request, to.count, type);
    desc.position = tokens_of(call, "position", position, to.count, type);
    desc.cu_seqlens = tokens_of(call, "cu_seqlens", cu_seqlens, desc.requests + 1, type);
    desc.starts = tokens_of(call, "starts", starts, desc.requests, type);
    desc.token_type = type;
    desc.slot = slot.data_ptr(), desc.slot_type = to.type, desc.count = to.count;
    desc.rejected = call.counter(rejected);
    call.run(kvprim_slots, kvprim_cuda_slots, desc);
}

Tensor slots_new(const Tensor &pages, int64_t count, int64_t page_rows, int64_t rows, MaybeTensor request,
                 MaybeTensor position, MaybeTensor cu_seqlens, MaybeTensor starts, bool pdl)
{
    const Tensor slot = empty({count}, at::kLong, pages.device());
    slots(slot, pages, page_rows, rows, request, position, cu_seqlens, starts, std::nullopt, pdl);
    return slot;
}

/* A GPU's operators also take tensors of the CPU; if all lie there, torch picks those of the CPU. */
void implement(torch::Library &m)
{
    m.impl("gather", &gather);
    m.impl("gather_new", &gather_new);
    m.impl("store", &store);
    m.impl("transfer", &transfer);
    m.impl("copy", &copy);
    m.impl("slots", &slots);
    m.impl("slots_new", &slots_new);
}
} // namespace

/* (a!) marks what an operator writes: torch.compile keeps its reads and writes in order. Limits of Inductor (torch
   2.11): functional operators must write nothing else; if one operator writes several views of a tensor, as kv[0] and
   kv[1], Inductor may lose what is written to all but the first; and it may write a view whose offset depends on
   dynamic sizes at offset 0. Neither is an error there, so the fake functions in 12_torch_ops.py refuse both: keep the
   sizes of caches static, as torch.compile does unless told otherwise. Safe with K and V in one tensor:
       - store with kv_dim, which takes the tensor whole, in one launch
       - a store of K, with v None, and one of V as if it were K
       - an operator of your own (torch.library.custom_op) that mutates the whole tensor and calls store on its parts;
         scale caches inside their cache need this
       - calls outside of compiled graphs: these take views of one tensor as they are */
TORCH_LIBRARY(kvprim, m)
{
    const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

    /* out[i] = row index[i] - base of src; zeros if there is none. `scale`: a scale, or a scale cache. */
    m.def("gather(Tensor(a!) out, Tensor src, Tensor index, str layout=\"rows\", *, str cache_dtype=\"auto\", "
          "Tensor? scale=None, int base=0, Tensor(b!)? rejected=None, bool pdl=False) -> ()",
          tags);
    /* The same, in a tensor of src's dtype, or of `dtype`, which a gather that converts must name. */
    m.def("gather_new(Tensor src, Tensor index, str layout=\"rows\", *, str cache_dtype=\"auto\", "
          "Tensor? scale=None, ScalarType? dtype=None, int base=0, bool pdl=False) -> Tensor",
          tags);

    /* Rows slot[i] - base of the caches, both of one layout, = k[i] and v[i]; slots outside them are skipped. k and v
       are [tokens, ...], of which the first slot.numel() are stored. Quantised rows are divided by k_scale and v_scale
       (with scale_inverse multiplied), or by the scales that the store computes and writes to k_scale_cache and
       v_scale_cache. With kv_dim v_cache is None, and k_cache holds K and V: k_cache.select(kv_dim, 0) and (kv_dim, 1),
       as in [2, ...] and [pages, 2, ...]; in the last dimension, K's elements and then V's. layout describes each part
       by itself. */
    m.def("store(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slot, str layout=\"rows\", *, "
          "str cache_dtype=\"auto\", int? kv_dim=None, Tensor? k_scale=None, Tensor? v_scale=None, "
          "Tensor(c!)? k_scale_cache=None, Tensor(d!)? v_scale_cache=None, bool scale_inverse=False, int base=0, "
          "Tensor(e!)? rejected=None, bool pdl=False) -> ()",
          tags);

    /* In every layer row dst_index[i] of dst = row src_index[i] of src; without an index, row i. dst and src are lists
       of layers of one shape. Instead, dst_layers and src_layers are tensors of pointers on the GPU; dst[0] and src[0]
       then only say the shape of a layer, and what lies at the pointers is not checked. For torch.compile list all
       layers beside the pointers: it must know what is written. same_cache: copies rows inside one cache. The dtypes
       are as cache_dtype, without whole formats; a scale is for all layers, or [layers], or [layers, heads]. */
    m.def("transfer(Tensor(a!)[] dst, Tensor[] src, Tensor? dst_index=None, Tensor? src_index=None, "
          "str dst_layout=\"rows\", str src_layout=\"rows\", *, Tensor? dst_layers=None, Tensor? src_layers=None, "
          "bool same_cache=False, int max_sms=0, Tensor(b!)? rejected=None, str dst_dtype=\"auto\", "
          "str src_dtype=\"auto\", Tensor? dst_scale=None, Tensor? src_scale=None) -> ()",
          tags);

    /* dst[i] = src[i], as torch._foreach_copy_ does, for tensors of the same dtype, shape and order of elements. */
    m.def("copy(Tensor(a!)[] dst, Tensor[] src) -> ()", tags);

    /* slot = pages[request][position / page_rows] * page_rows + position % page_rows; -1 if there is none. Tokens are
       (request[i], position[i]), or those that cu_seqlens[r] .. cu_seqlens[r + 1] say, from position starts[r] (0) on.
       `rows`: of the cache. */
    m.def("slots(Tensor(a!) slot, Tensor pages, int page_rows, int rows, *, Tensor? request=None, "
          "Tensor? position=None, Tensor? cu_seqlens=None, Tensor? starts=None, Tensor(b!)? rejected=None, "
          "bool pdl=False) -> ()",
          tags);
    m.def("slots_new(Tensor pages, SymInt count, int page_rows, int rows, *, Tensor? request=None, "
          "Tensor? position=None, Tensor? cu_seqlens=None, Tensor? starts=None, bool pdl=False) -> Tensor",
          tags);
}

TORCH_LIBRARY_IMPL(kvprim, CPU, m)
{
    implement(m);
}

TORCH_LIBRARY_IMPL(kvprim, CUDA, m)
{
    implement(m);
}
