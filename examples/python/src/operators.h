/* SPDX-License-Identifier: MIT */
/* kvprim's operators: what they check of tensors, and the descriptors that they make of them. kvprim/__init__.py says
   what each takes. They read their arguments, in the order there, through `Arguments`, which torch_operators.cpp
   implements for torch's dispatcher and python_module.cpp for calls from Python. */
#define KVPRIM_EXPORT
#include "kvprim_cuda.cuh"

#include <algorithm>
#include <dlfcn.h>
#include <iterator>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/* A libkvprim.so that was built without nvcc lacks these. */
#pragma weak kvprim_cuda_gather
#pragma weak kvprim_cuda_store
#pragma weak kvprim_cuda_transfer
#pragma weak kvprim_cuda_unpack
#pragma weak kvprim_cuda_copy
#pragma weak kvprim_cuda_slots
#pragma weak kvprim_cuda_fetch
#pragma weak kvprim_cuda_fetch_reset
#pragma weak kvprim_cuda_move

namespace
{
using Text = std::string_view;

/* An element type, as DLPack numbers them. */
struct Dtype {
    uint8_t code, bits;

    bool operator==(Dtype other) const
    {
        return code == other.code && bits == other.bits;
    }

    bool is_integer() const
    {
        return code <= 1;
    }
};

constexpr Dtype INT32 = {0, 32}, INT64 = {0, 64}, UINT8 = {1, 8}, FLOAT32 = {2, 32}, E8M0 = {14, 8};
constexpr int32_t CPU = -1, NO_DEVICE = -2; // as Tensor::device

/* What is known of a tensor. Sizes and strides are elements. */
struct Tensor {
    static constexpr int64_t most = 8;
    void *data = nullptr;
    Dtype dtype = {};
    int32_t device = CPU; // or the number of a GPU
    int64_t dims = 0, numel = 1, size[most], stride[most];
    void *owner = nullptr; // for Arguments::keep

    Tensor() // leaves sizes and strides as they are: there may be many tensors
    {
    }

    int64_t itemsize() const
    {
        return dtype.bits / 8;
    }

    // As DLPack says it: an element is `lanes` numbers of `bits`. Vectors are only copied: no operation takes them for
    // numbers of as many bits.
    void set_dtype(uint8_t code, uint32_t bits, uint32_t lanes)
    {
        constexpr uint8_t opaque = 3;
        dtype = {lanes > 1 ? opaque : code, static_cast<uint8_t>(bits * lanes)};
        if (bits * lanes == 0 || bits * lanes % 8 != 0 || bits * lanes > 128)
            throw std::runtime_error("kvprim takes elements of 1 to 16 whole bytes, not " + std::to_string(lanes) +
                                     " x " + std::to_string(bits) + " bits");
    }

    void set_sizes(int64_t n, const int64_t *sizes, const int64_t *strides)
    {
        if (n > most)
            throw std::runtime_error("kvprim takes tensors of at most 8 dimensions, not " + std::to_string(n));
        dims = n;
        for (int64_t d = 0; d < n; d++)
            size[d] = sizes[d], stride[d] = strides[d], numel *= sizes[d];
        for (int64_t d = 0; d < n && numel == 0; d++)
            stride[d] = std::max<int64_t>(stride[d], 1); // numpy's empty arrays have strides of 0
    }

    /* Elements from the first to the end of the last; at least one element. */
    int64_t extent() const
    {
        int64_t elements = 1;
        for (int64_t d = 0; d < dims; d++)
            elements += (size[d] - 1) * stride[d];
        return elements;
    }

    bool is_contiguous() const
    {
        int64_t step = 1;
        for (int64_t d = dims - 1; d >= 0; step *= size[d], d--)
            if (size[d] != 1 && stride[d] != step)
                return numel == 0;
        return true;
    }

    /* Whether its elements lie without gaps, in whatever order. */
    bool is_dense() const
    {
        std::vector<std::pair<int64_t, int64_t>> order;
        for (int64_t d = 0; d < dims; d++)
            if (size[d] != 1)
                order.emplace_back(stride[d], size[d]);
        std::sort(order.begin(), order.end());
        int64_t step = 1;
        for (const auto &[distance, count] : order) {
            if (distance != step)
                return false;
            step *= count;
        }
        return true;
    }

    /* Of dimension d the elements [from, from + count), or element `from` alone, without the dimension. */
    Tensor narrow(int64_t d, int64_t from, int64_t count) const
    {
        Tensor part = *this;
        part.data = static_cast<char *>(data) + from * stride[d] * itemsize();
        part.numel = size[d] ? numel / size[d] * count : 0, part.size[d] = count;
        return part;
    }

    Tensor select(int64_t d, int64_t from) const
    {
        Tensor part = narrow(d, from, 1);
        part.dims--;
        for (; d < part.dims; d++)
            part.size[d] = size[d + 1], part.stride[d] = stride[d + 1];
        return part;
    }
};

using MaybeTensor = std::optional<Tensor>;

/* ---- errors ---- */

std::string text_of(Text text)
{
    return std::string(text);
}

std::string text_of(int64_t number)
{
    return std::to_string(number);
}

std::string text_of(Dtype dtype)
{
    constexpr const char *names[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    constexpr const char *float8[] = {"_e3m4",     "_e4m3", "_e4m3b11fnuz", "_e4m3fn",
                                      "_e4m3fnuz", "_e5m2", "_e5m2fnuz",    "_e8m0fnu"};
    if (dtype.code < 7)
        return dtype.code == 6 ? "bool" : names[dtype.code] + std::to_string(dtype.bits);
    return dtype.code < 15 ? std::string("float8") + float8[dtype.code - 7] : "dtype " + std::to_string(dtype.code);
}

std::string device_name(int32_t device)
{
    return device == CPU ? "cpu" : "cuda:" + std::to_string(device);
}

std::string list_of(const int64_t *numbers, int64_t count)
{
    std::string text;
    for (int64_t i = 0; i < count; i++)
        text += (i ? ", " : "") + std::to_string(numbers[i]);
    return "[" + text + "]";
}

std::string sizes_of(const Tensor &tensor)
{
    return list_of(tensor.size, tensor.dims);
}

std::string strides_of(const Tensor &tensor)
{
    return list_of(tensor.stride, tensor.dims);
}

/* Throws what becomes a RuntimeError. Without streams: those crash if the compiler links a libstdc++ of its own into
   this library, as some are set up to. */
template <class... Parts> [[noreturn]] void refuse(const Parts &...parts)
{
    throw std::runtime_error((text_of(parts) + ...));
}

#define EXPECT(holds, ...)                                                                                             \
    do                                                                                                                 \
        if (!(holds))                                                                                                  \
            refuse(__VA_ARGS__);                                                                                       \
    while (0)

void expect_ok(kvprim_status status)
{
    EXPECT(status == KVPRIM_OK, kvprim_status_name(status), ": ", kvprim_last_error());
}

/* ---- arguments and calls ---- */

/* CUDA's driver, which is in each process that uses a GPU: pinned memory takes some of its functions. */
void *driver_function(const char *name)
{
    void *const library = dlopen("libcuda.so.1", RTLD_LAZY), *const function = library ? dlsym(library, name) : nullptr;
    EXPECT(function, "kvprim: libcuda.so.1 has no ", name);
    return function;
}

template <class... Types> int call(void *function, Types... arguments)
{
    return reinterpret_cast<int (*)(Types...)>(function)(arguments...);
}

#define DRIVER(name, ...)                                                                                              \
    [&] {                                                                                                              \
        static void *const function = driver_function(#name);                                                          \
        return call(function, __VA_ARGS__);                                                                            \
    }()

bool is_pinned(const Tensor &tensor)
{
    unsigned type = 0;
    const int status =
        DRIVER(cuPointerGetAttribute, &type, 2 /* memory type */, reinterpret_cast<uint64_t>(tensor.data));
    return status == 0 && type != 0;
}

/* Keeps pinned tensors until the GPU has done with them. torch's allocator of pinned memory does not know of our calls
   (its stable ABI cannot tell it): it would hand the memory out again as soon as the caller drops the tensor. While a
   graph is captured there is nothing to wait for: the caller keeps what a graph reads as long as the graph. */
class Keeper
{
    struct Kept {
        void *event;
        std::vector<void *> owners;
    };

    std::mutex mutex;
    std::vector<Kept> kept;
    void (*const release)(void *owner);

  public:
    explicit Keeper(void (*release_owner)(void *)) : release(release_owner)
    {
    }

    /* Takes references that `release` gives back. */
    void keep(std::vector<void *> owners, void *stream)
    {
        int capturing = 0, mode = 2; // relaxed: queries do not disturb a capture in another thread
        void *event = nullptr;
        DRIVER(cuStreamIsCapturing, stream, &capturing);
        if (!capturing && DRIVER(cuEventCreate, &event, 2u /* no timing */) == 0)
            DRIVER(cuEventRecord, event, stream);
        std::vector<Kept> done;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            DRIVER(cuThreadExchangeStreamCaptureMode, &mode);
            const auto busy = std::stable_partition(kept.begin(), kept.end(), [&](const Kept &one) {
                return DRIVER(cuEventQuery, one.event) != 600; // CUDA_ERROR_NOT_READY
            });
            DRIVER(cuThreadExchangeStreamCaptureMode, &mode);
            done.assign(std::make_move_iterator(kept.begin()), std::make_move_iterator(busy));
            kept.erase(kept.begin(), busy);
            (event ? kept : done).push_back({event, std::move(owners)});
        }
        for (const Kept &one : done) {
            if (one.event)
                DRIVER(cuEventDestroy_v2, one.event);
            for (void *const owner : one.owners)
                release(owner);
        }
    }
};

/* The arguments of an operator, one after the other, and what only its caller's side knows. */
struct Arguments {
    virtual bool skip_none() = 0; // whether an optional argument is None, which is then read
    virtual Tensor tensor() = 0;
    virtual std::vector<Tensor> tensors() = 0;
    virtual std::vector<int64_t> integers() = 0;
    virtual int64_t integer() = 0; // or a bool
    virtual double number() = 0;
    virtual Text text() = 0; // valid as long as the arguments

    MaybeTensor maybe_tensor()
    {
        return skip_none() ? std::nullopt : MaybeTensor(tensor());
    }

    std::optional<int64_t> maybe_integer()
    {
        return skip_none() ? std::nullopt : std::optional(integer());
    }

    bool boolean()
    {
        return integer() != 0;
    }

    /* Makes the GPU the current one while the arguments live, and returns torch's current stream there. */
    virtual void *use_gpu(int32_t gpu) = 0;
    /* Keeps the tensors' memory until what is enqueued on the stream is done. */
    virtual void keep(const std::vector<void *> &owners, void *stream) = 0;
    /* Around a call of kvprim, which may take long. */
    virtual void begin_call()
    {
    }
    virtual void end_call()
    {
    }

  protected:
    ~Arguments() = default;
};

/* A call of kvprim on one device, the CPU or a GPU. */
class Call
{
    Arguments &arguments;
    const int32_t device;
    kvprim_cuda_launch launch = {};
    std::vector<void *> pinned;

  public:
    Call(Arguments &a, int32_t on, bool pdl = false, int64_t max_sms = 0) : arguments(a), device(on)
    {
        EXPECT(on != NO_DEVICE, "kvprim runs on the CPU and on GPUs of CUDA, and these tensors are elsewhere");
        if (on == CPU)
            return;
        EXPECT(kvprim_cuda_gather, "this kvprim was built without nvcc, for the CPU alone");
        launch.stream = static_cast<decltype(launch.stream)>(a.use_gpu(on));
        launch.pdl = pdl;
        launch.max_sms = static_cast<int32_t>(std::clamp<int64_t>(max_sms, -1, INT32_MAX));
    }

    void takes(const char *name, const Tensor &tensor) const
    {
        EXPECT(tensor.device == device, name, " is on ", device_name(tensor.device), ", but this call runs on ",
               device_name(device));
    }

    /* A tensor of this device, or for a GPU one in pinned memory. */
    void takes_pinned(const char *name, const Tensor &tensor)
    {
        if (tensor.numel == 0)
            return;
        if (device == CPU || tensor.device != CPU)
            return takes(name, tensor);
        EXPECT(is_pinned(tensor), name, " is in pageable memory, which ", device_name(device),
               " does not reach; use pin_memory()");
        pinned.push_back(tensor.owner);
    }

    uint32_t *counter(const MaybeTensor &count, const char *name = "rejected") const
    {
        if (!count)
            return nullptr;
        takes(name, *count);
        EXPECT(count->numel == 1 && count->dtype.is_integer() && count->dtype.bits == 32, name, " is ", count->dtype,
               " of ", count->numel, " elements, not one int32");
        return static_cast<uint32_t *>(count->data);
    }

    template <class Function> void call(Function function)
    {
        arguments.begin_call();
        const kvprim_status status = function();
        arguments.end_call();
        expect_ok(status);
        if (!pinned.empty())
            arguments.keep(pinned, launch.stream);
    }

    /* Calls function(launch), NULL for the CPU. */
    template <class Function> void start(Function function)
    {
        call([&] { return function(device == CPU ? nullptr : &launch); });
    }

    template <class Desc>
    void run(kvprim_status (*cpu)(const Desc *), kvprim_status (*gpu)(const Desc *, const kvprim_cuda_launch *),
             const Desc &desc)
    {
        call([&] { return device == CPU ? cpu(&desc) : gpu(&desc, &launch); });
    }

    void move(const kvprim_move *moves, size_t n)
    {
        call([&] { return device == CPU ? kvprim_cpu_move(moves, n) : kvprim_cuda_move(moves, n, &launch); });
    }
};

/* ---- tensors as kvprim sees them ---- */

enum class Layout { rows, nhd, hnd };

Layout layout_of(const char *name, Text text)
{
    if (text == "rows")
        return Layout::rows;
    EXPECT(text == "NHD" || text == "HND", name, " is \"", text, "\", not \"rows\", \"NHD\" or \"HND\"");
    return text == "NHD" ? Layout::nhd : Layout::hnd;
}

/* A tensor whose page's rows come before its heads. */
struct Shape : Tensor {
    int64_t elements; // up to and including the last

    Shape(const char *name, const Tensor &tensor, Layout layout) : Tensor(tensor)
    {
        const int64_t fewest = layout == Layout::rows ? 1 : layout == Layout::nhd ? 2 : 3;
        EXPECT(dims >= fewest, name, " has ", dims, " dimensions, but its layout needs ", fewest);
        for (int64_t d = 0; d < dims; d++)
            EXPECT(size[d] <= 1 || stride[d] > 0, name, " is expanded in dimension ", d, ", as its strides ",
                   strides_of(tensor), " say; make it contiguous");
        elements = extent();
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
    int64_t bits = 0;                // of an element
};

Rows rows_of(const char *name, const Tensor &tensor, Layout layout = Layout::rows)
{
    const Shape shape(name, tensor, layout);
    const int64_t begin = layout == Layout::rows ? 1 : 2, element = tensor.itemsize();
    Rows rows;
    rows.bits = tensor.dtype.bits;
    if (tensor.numel == 0)
        return rows;
    int64_t d = shape.dims - 1;
    const int64_t piece = shape.merge(d, begin, 1), step = d >= begin ? shape.stride[d] : 0;
    const int64_t heads = shape.merge(d, begin, step);
    EXPECT(d < begin && heads <= INT32_MAX, name, " has sizes ", sizes_of(tensor), " and strides ", strides_of(tensor),
           ": its rows neither are packed nor lie in equal pieces at equal distances");
    rows.table.data = tensor.data;
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
    EXPECT(tensor.dtype == INT32 || tensor.dtype == INT64, name, " is ", tensor.dtype, ", not int32 or int64");
    EXPECT(tensor.dims == 1, name, " has ", tensor.dims, " dimensions, not 1");
    const int64_t stride = tensor.numel > 1 ? tensor.stride[0] : 1;
    EXPECT(stride > 0, name, " is expanded; make it contiguous");
    return {tensor.data, tensor.dtype == INT32 ? KVPRIM_I32 : KVPRIM_I64, stride, tensor.numel};
}

/* ---- element types ---- */

/* What cache_dtype may be, other than "auto". */
struct Named {
    Text name;
    kvprim_dtype dtype;
    bool per_token_head; // computes its scales as vLLM does
    int64_t token_bytes; // of a whole format: of a page, divided by its tokens
};

constexpr Named formats_by_name[] = {{"fp8", KVPRIM_F8E4M3, false, 0},
                                     {"fp8_e4m3", KVPRIM_F8E4M3, false, 0},
                                     {"fp8_e5m2", KVPRIM_F8E5M2, false, 0},
                                     {"int8", KVPRIM_INT8, false, 0},
                                     {"fp4_e2m1", KVPRIM_F4E2M1, false, 0},
                                     {"fp4_e2m1_swizzled", KVPRIM_F4E2M1, false, 0},
                                     {"int4", KVPRIM_INT4, false, 0},
                                     {"fp8_per_token_head", KVPRIM_F8E4M3, true, 0},
                                     {"int8_per_token_head", KVPRIM_INT8, true, 0},
                                     {"fp8_ds_mla", KVPRIM_F8E4M3, false, 656},
                                     {"fp8_ds_mla_sglang", KVPRIM_F8E4M3, false, 656},
                                     {"fp8_ds_mla_v4", KVPRIM_F8E4M3, false, 584},
                                     {"fp8_ds_mla_v41", KVPRIM_F8E4M3, false, 528},
                                     {"fp8_indexer", KVPRIM_F8E4M3, false, 132},
                                     {"fp8_indexer_ue8m0", KVPRIM_F8E4M3, false, 132}};

const Named *format_named(Text name)
{
    const auto found = std::find_if(std::begin(formats_by_name), std::end(formats_by_name),
                                    [&](const Named &one) { return one.name == name; });
    return name == "auto" || found == std::end(formats_by_name) ? nullptr : found;
}

const Named *preset_named(Text name)
{
    const Named *const named = format_named(name);
    return named && named->token_bytes ? named : nullptr;
}

bool is_4_bits(kvprim_dtype dtype)
{
    return dtype == KVPRIM_F4E2M1 || dtype == KVPRIM_INT4;
}

/* Rows of a cache, two of whose elements may lie in a byte. */
Rows rows_of_cache(const char *name, const Tensor &tensor, Layout layout, Text dtype)
{
    Rows rows = rows_of(name, tensor, layout);
    const Named *const named = format_named(dtype);
    if (named && is_4_bits(named->dtype))
        rows.elements *= 2, rows.bits = 4;
    return rows;
}

kvprim_dtype dtype_of(const char *name, Dtype dtype)
{
    constexpr std::pair<Dtype, kvprim_dtype> types[] = {{{2, 16}, KVPRIM_F16},    {{4, 16}, KVPRIM_BF16},
                                                        {{2, 32}, KVPRIM_F32},    {{0, 8}, KVPRIM_INT8},
                                                        {{10, 8}, KVPRIM_F8E4M3}, {{12, 8}, KVPRIM_F8E5M2}};
    for (const auto &[ours, theirs] : types)
        if (ours == dtype)
            return theirs;
    refuse(name, " is ", dtype, ", which is no element type that kvprim converts; cache_dtype says what uint8 is");
}

/* The format of a tensor's elements, without a scale. */
kvprim_format format_of(const char *name, const Tensor &tensor, Text dtype)
{
    kvprim_format format = {};
    if (dtype == "auto") {
        format.dtype = dtype_of(name, tensor.dtype);
        return format;
    }
    const Named *const named = format_named(dtype);
    if (!named || named->token_bytes) {
        std::string names = "\"auto\"";
        for (const Named &one : formats_by_name)
            names += ", \"" + text_of(one.name) + "\"";
        refuse("the dtype of ", name, " is \"", dtype, "\", not one of ", names);
    }
    EXPECT(tensor.dtype == UINT8 || dtype_of(name, tensor.dtype) == named->dtype, name, " is ", tensor.dtype,
           ", which does not hold \"", dtype, "\"");
    format.dtype = named->dtype;
    format.scale_inverse = named->per_token_head;
    format.scale_min = named->per_token_head ? 1e-6f : 0;
    format.scale_order = dtype == "fp4_e2m1_swizzled" ? KVPRIM_SCALES_SWIZZLED : KVPRIM_SCALES_LINEAR;
    return format;
}

/* A scale for all, or for each head: [], [1] or [heads]. A transfer has `layers`: for more than one of them [layers] in
   place of [heads], and [layers, heads]. It is read. */
void set_scale(kvprim_format &format, const Call &call, const char *name, const Tensor &scale, int64_t elements,
               int64_t layers = 0)
{
    call.takes(name, scale);
    EXPECT(scale.dtype == FLOAT32, name, " is ", scale.dtype, ", not float32");
    const int64_t dims = scale.dims, each = layers > 0 && (dims == 2 || (layers > 1 && scale.numel > 1));
    const int64_t heads = dims > each ? scale.size[dims - 1] : 1;
    EXPECT(dims <= 1 + each && heads > 0 && (!each || scale.size[0] == layers), name, " has shape ", sizes_of(scale),
           layers > 0 ? ", not one element, [layers] or [layers, heads]" : ", not one element or [heads]");
    EXPECT(elements % heads == 0, name, " has ", heads, " elements, but a row ", elements, ": not as many for each");
    format.scale = heads > 1 ? KVPRIM_SCALE_HEAD : KVPRIM_SCALE_TENSOR;
    format.tile = heads > 1 ? elements / heads : 0;
    format.scales = scale.data, format.scales_bytes = scale.extent() * 4;
    format.scale_tile_stride = heads > 1 ? scale.stride[dims - 1] * 4 : 0;
    format.scale_layer_stride = layers == 1 ? 0 : each ? scale.stride[0] * 4 : int64_t(KVPRIM_SCALES_SHARED);
    EXPECT((heads == 1 || format.scale_tile_stride > 0) && (!each || layers == 1 || scale.stride[0] > 0), name,
           " is expanded; make it contiguous");
}

/* What multiplies all scales of elements of 4 bits. */
void set_tensor_scale(kvprim_format &format, const Call &call, const char *name, const Tensor &scale)
{
    call.takes(name, scale);
    EXPECT(scale.dtype == FLOAT32 && scale.numel == 1, name, " is ", scale.dtype, " of ", scale.numel,
           " elements, not one float32, as elements of 4 bits have beside a scale cache");
    format.tensor_scale = static_cast<const float *>(scale.data);
}

/* A scale for each tile of each row of a cache, in memory of their own or between its rows. */
void set_scale_cache(kvprim_format &format, const Call &call, const char *name, const Tensor &scales, Layout layout,
                     kvprim_table &table, int64_t elements)
{
    call.takes(name, scales);
    constexpr std::pair<Dtype, kvprim_dtype> types[] = {
        {FLOAT32, KVPRIM_F32}, {E8M0, KVPRIM_F8E8M0}, {{10, 8}, KVPRIM_F8E4M3}, {{2, 16}, KVPRIM_F16}};
    const bool few_bits = is_4_bits(format.dtype);
    const auto *const end = std::begin(types) + (few_bits ? 4 : 2);
    const auto *const type =
        std::find_if(std::begin(types), end, [&](const auto &one) { return one.first == scales.dtype; });
    EXPECT(type != end, name, " is ", scales.dtype, ", not float32", few_bits ? ", float8_e4m3fn, float16" : "",
           " or float8_e8m0fnu");
    if (table.rows == 0) { // an empty cache says nothing of its pages, and has no rows to convert
        kvprim_format plain = {};
        plain.dtype = format.dtype, plain.nans = format.nans, format = plain;
        return;
    }
    const Shape shape(name, scales, layout);
    const int64_t begin = layout == Layout::rows ? 1 : 2, size = scales.itemsize();
    const bool in_heads = begin == 2 && shape.dims == 4;
    const int64_t of_head = shape.size[shape.dims - 1], tiles = of_head * (in_heads ? shape.size[2] : 1);
    const int64_t page_rows = begin == 2 ? table.page_rows : 1;
    EXPECT(shape.dims == begin + (in_heads ? 2 : 1) && tiles > 0 && shape.size[0] * page_rows == table.rows &&
               (begin == 1 || shape.size[1] == page_rows),
           name, " has shape ", sizes_of(scales), ", which does not fit its cache's ", table.rows, " rows");
    EXPECT(elements % tiles == 0, name, " has ", tiles, " scales in a row, but its cache ", elements,
           " elements: not as many for each");
    format.scale = KVPRIM_SCALE_TILE;
    format.scale_dtype = type->second;
    format.tile = elements / tiles;
    format.scale_tile_stride = tiles > 1 && !in_heads ? shape.stride[begin] * size : 0;
    format.scale_stride = shape.size[begin - 1] > 1 && !in_heads ? shape.stride[begin - 1] * size : 0;
    if (in_heads) {
        EXPECT((of_head == 1 || shape.stride[3] == 1) && (page_rows == 1 || shape.stride[1] == of_head) &&
                   (shape.size[2] == 1 || shape.stride[2] == page_rows * of_head),
               name, " has strides ", strides_of(scales), ", but scales of heads are packed: [pages, heads, page, ",
               of_head, "] in memory");
        format.scale_heads = static_cast<int32_t>(shape.size[2]);
    }
    format.scale_page_stride = begin == 2 && shape.size[0] > 1 ? shape.stride[0] * size : 0;
    char *const at = static_cast<char *>(scales.data), *const cache = static_cast<char *>(table.data);
    if (at < cache || at >= cache + table.bytes) {
        format.scales = at, format.scales_bytes = shape.elements * size;
        return;
    }
    format.scale_offset = at - cache;
    table.bytes = std::max(table.bytes, format.scale_offset + shape.elements * size);
}

/* Whether a call converts. If so, rows of both sides have as many elements; otherwise one dtype, and as many bytes. */
bool converts(const char *a_name, const Tensor &a, const Rows &a_rows, const char *b_name, const Tensor &b,
              const Rows &b_rows, bool asked)
{
    const bool empty = a.numel == 0 || b.numel == 0;
    if (!asked && a.dtype == b.dtype) {
        EXPECT(empty || a_rows.bytes == b_rows.bytes, "a row of ", a_name, " has ", a_rows.bytes, " bytes, but one of ",
               b_name, " ", b_rows.bytes);
        return false;
    }
    EXPECT(empty || a_rows.elements == b_rows.elements, "a row of ", a_name, " has ", a_rows.elements,
           " elements, but one of ", b_name, " ", b_rows.elements);
    return true;
}

/* Bytes of a row, as src has them. One of the tensors may be empty. */
int64_t row_bytes(const Rows &dst, const Rows &src)
{
    return std::max(dst.elements, src.elements) * src.bits / 8;
}

/* A cache in a whole format: the tables of what it quantises (K) and of what it copies (V). */
void find_preset(kvprim_layout &preset, const Named &named, const char *name, const Tensor &cache, Layout layout)
{
    const int64_t dims = layout == Layout::rows ? 2 : 3, page_rows = dims == 3 && cache.dims == 3 ? cache.size[1] : 1;
    EXPECT(layout != Layout::hnd && cache.dims == dims && cache.itemsize() == 1 &&
               cache.size[dims - 1] == named.token_bytes && cache.stride[dims - 1] == 1 &&
               (dims == 2 || page_rows == 1 || cache.stride[1] == named.token_bytes),
           name, " is ", cache.dtype, " of shape ", sizes_of(cache), " and strides ", strides_of(cache), ", but ",
           named.name, " needs uint8 [pages, page, ", named.token_bytes, "] (\"NHD\") or [rows, ", named.token_bytes,
           "] (\"rows\") with packed pages");
    char *const data = static_cast<char *>(cache.data);
    kvprim_layout_sizes sizes = {};
    sizes.data = data, sizes.rows = cache.size[0] * page_rows, sizes.page_rows = page_rows;
    sizes.page_stride = cache.size[0] > 1 ? cache.stride[0] : 0;
    expect_ok(kvprim_layout_find(text_of(named.name).c_str(), &sizes, &preset));
    const int64_t bytes = (cache.size[0] - 1) * cache.stride[0] + page_rows * named.token_bytes;
    for (kvprim_table *const table : {&preset.k_cache, &preset.v_cache})
        if (table->data)
            table->bytes = bytes - (static_cast<char *>(table->data) - data);
}

/* Rows of k with what a preset quantises, of v with what it copies, or of k with both. */
struct Parts {
    Rows k, v;
    kvprim_format k_format = {};

    Parts(const kvprim_layout &preset, const char *k_name, const Tensor &k_tensor, const char *v_name,
          const MaybeTensor &v_tensor, Layout layout = Layout::rows)
        : k(rows_of(k_name, k_tensor, layout))
    {
        const int64_t size = k_tensor.itemsize();
        k_format = format_of(k_name, k_tensor, "auto");
        EXPECT(preset.v_elements == 0 || size == 2, k_name, " is ", k_tensor.dtype,
               ", but this format copies 16-bit elements");
        EXPECT(k.elements == preset.k_elements || k_tensor.numel == 0 ||
                   (!v_tensor && k.elements == preset.k_elements + preset.v_elements),
               "a row of ", k_name, " has ", k.elements, " elements, but this format ", preset.k_elements, " and ",
               preset.v_elements);
        if (v_tensor) {
            v = rows_of(v_name, *v_tensor);
            EXPECT(v_tensor->itemsize() == 2 && (v.elements == preset.v_elements || v_tensor->numel == 0), "a row of ",
                   v_name, " has ", v.elements, " elements of ", v_tensor->dtype, ", but this format copies ",
                   preset.v_elements, " 16-bit ones");
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

void gather_preset(Call &call, const Named &named, const Tensor &out, const Tensor &src, Layout layout,
                   kvprim_gather_desc &desc)
{
    kvprim_layout preset = {};
    find_preset(preset, named, "src", src, layout);
    const Parts to(preset, "out", out, nullptr, std::nullopt);
    desc.dst = to.k.table, desc.src = preset.k_cache, desc.row_bytes = preset.k_elements;
    kvprim_move moves[2];
    expect_ok(kvprim_gather_moves(&desc, &moves[0]));
    if (to.v.bytes) {
        desc.dst = to.v.table, desc.src = preset.v_cache, desc.row_bytes = to.v.bytes, desc.rejected = nullptr;
        expect_ok(kvprim_gather_moves(&desc, &moves[1]));
    }
    call.move(moves, to.v.bytes ? 2 : 1);
}

/* A transfer to rows 0, 1, ... leaves those alone that a gather fills with zeros. */
void gather_kept(Call &call, const kvprim_gather_desc &gather)
{
    kvprim_transfer_desc desc = {};
    desc.dst = gather.dst, desc.src = gather.src, desc.row_bytes = gather.row_bytes;
    desc.src_index = gather.index, desc.src_index_type = gather.index_type, desc.src_index_base = gather.index_base;
    desc.src_index_stride = gather.index_stride, desc.count = gather.count, desc.rejected = gather.rejected;
    call.run(kvprim_transfer, kvprim_cuda_transfer, desc);
}

void gather(Arguments &a)
{
    const Tensor out = a.tensor(), src = a.tensor(), index = a.tensor();
    const Layout layout = layout_of("layout", a.text());
    const Text cache_dtype = a.text();
    const MaybeTensor scale = a.maybe_tensor();
    const int64_t base = a.integer();
    const bool keep_padding = a.boolean();
    const MaybeTensor rejected = a.maybe_tensor();
    Call call(a, out.device, a.boolean());
    const MaybeTensor tensor_scale = a.maybe_tensor();
    call.takes("src", src);
    call.takes("index", index);
    const Index rows = index_of("index", index);
    kvprim_gather_desc desc = {};
    desc.index = rows.data, desc.index_type = rows.type, desc.index_stride = rows.stride;
    desc.index_base = base, desc.count = rows.count, desc.rejected = call.counter(rejected);
    if (const Named *const named = preset_named(cache_dtype)) {
        EXPECT(!scale && !tensor_scale, "scale is given, but ", cache_dtype, " holds its own");
        EXPECT(!keep_padding, "keep_padding is given, but a gather of ", cache_dtype, " writes every row");
        return gather_preset(call, *named, out, src, layout, desc);
    }
    const Rows to = rows_of("out", out), from = rows_of_cache("src", src, layout, cache_dtype);
    EXPECT(!tensor_scale || (scale && scale->dims > 1 && from.bits == 4),
           "tensor_scale is given, but no cache of elements of 4 bits with scale, a scale cache");
    kvprim_format formats[2];
    desc.dst = to.table, desc.src = from.table, desc.row_bytes = row_bytes(to, from);
    if (converts("out", out, to, "src", src, from, cache_dtype != "auto" || scale)) {
        formats[0] = format_of("out", out, "auto"), formats[1] = format_of("src", src, cache_dtype);
        formats[1].scale_inverse = 0;
        EXPECT(scale || !formats[1].scale_min, cache_dtype, " needs scale, the scale cache");
        if (tensor_scale)
            set_tensor_scale(formats[1], call, "tensor_scale", *tensor_scale);
        if (scale && scale->dims < 2)
            set_scale(formats[1], call, "scale", *scale, from.elements);
        else if (scale)
            set_scale_cache(formats[1], call, "scale", *scale, layout, desc.src, from.elements);
        desc.dst.format = &formats[0], desc.src.format = &formats[1];
    }
    if (keep_padding)
        return gather_kept(call, desc);
    call.run(kvprim_gather, kvprim_cuda_gather, desc);
}

/* What a store may say of quantised elements. */
struct Quantising {
    bool inverse, power_of_two;
    float least;
    uint32_t *nans;
};

/* Where a store finds and puts K, or V. */
struct StoreSide {
    const char *name, *cache_name, *scale_name, *scale_cache_name;
    const MaybeTensor &rows, &cache, &scale, &scale_cache;
    kvprim_format formats[2] = {};

    /* Fills in the tables of rows and cache, and the bytes of a row. */
    void describe(const Call &call, Layout layout, Text cache_dtype, const Quantising &how, kvprim_table &from_table,
                  kvprim_table &to_table, int64_t &bytes)
    {
        call.takes(name, *rows);
        call.takes(cache_name, *cache);
        const Rows from = rows_of(name, *rows), to = rows_of_cache(cache_name, *cache, layout, cache_dtype);
        from_table = from.table, to_table = to.table, bytes = from.bytes;
        const bool asked = cache_dtype != "auto" || scale || scale_cache;
        if (!converts(name, *rows, from, cache_name, *cache, to, asked))
            return;
        formats[0] = format_of(name, *rows, "auto"), formats[1] = format_of(cache_name, *cache, cache_dtype);
        if (*name == 'k')
            formats[1].scale_order = KVPRIM_SCALES_LINEAR;
        EXPECT(!scale || !scale_cache || to.bits == 4, scale_name, " and ", scale_cache_name, " are both given");
        EXPECT(scale_cache || !formats[1].scale_min, cache_dtype, " needs ", scale_cache_name);
        formats[1].scale_inverse |= how.inverse, formats[1].scale_power_of_two = how.power_of_two;
        formats[1].scale_min = how.least > 0 ? how.least : formats[1].scale_min;
        formats[1].nans = how.nans;
        if (scale && scale_cache)
            set_tensor_scale(formats[1], call, scale_name, *scale);
        else if (scale)
            set_scale(formats[1], call, scale_name, *scale, to.elements);
        if (scale_cache)
            set_scale_cache(formats[1], call, scale_cache_name, *scale_cache, layout, to_table, to.elements);
        from_table.format = &formats[0], to_table.format = &formats[1];
    }
};

/* K's and V's part of a cache that holds both, in a dimension of size 2 or beside each other in the last. */
std::pair<Tensor, Tensor> parts_of(const Tensor &cache, int64_t kv_dim, const Tensor &k)
{
    const int64_t dims = cache.dims, d = kv_dim < 0 ? kv_dim + dims : kv_dim, k_size = k.dims ? k.size[k.dims - 1] : 0;
    const bool cut = d == dims - 1;
    EXPECT(d >= 0 && d < dims && (cut ? k_size <= cache.size[d] : cache.size[d] == 2), "kv_dim is ", kv_dim,
           ", but k_cache has shape ", sizes_of(cache), ": not 2 there, nor K's elements before V's in the last");
    if (cut)
        return {cache.narrow(d, 0, k_size), cache.narrow(d, k_size, cache.size[d] - k_size)};
    return {cache.select(d, 0), cache.select(d, 1)};
}

void store(Arguments &a)
{
    const MaybeTensor k = a.tensor(), v = a.maybe_tensor();
    MaybeTensor k_cache = a.tensor(), v_cache = a.maybe_tensor();
    const Tensor slot = a.tensor();
    const Layout layout = layout_of("layout", a.text());
    const Text cache_dtype = a.text();
    const std::optional<int64_t> kv_dim = a.maybe_integer();
    const MaybeTensor k_scale = a.maybe_tensor(), v_scale = a.maybe_tensor();
    const MaybeTensor k_scale_cache = a.maybe_tensor(), v_scale_cache = a.maybe_tensor();
    Quantising how = {a.boolean(), a.boolean(), static_cast<float>(a.number()), nullptr};
    const MaybeTensor nans = a.maybe_tensor();
    const int64_t base = a.integer();
    const MaybeTensor rejected = a.maybe_tensor();
    Call call(a, k_cache->device, a.boolean());
    how.nans = call.counter(nans, "nans");
    if (kv_dim) {
        EXPECT(v && !v_cache, "kv_dim says that k_cache holds K and V, so v must be a tensor and v_cache None");
        std::tie(k_cache, v_cache) = parts_of(*k_cache, *kv_dim, *k);
    }
    call.takes("slot", slot);
    const Index slots = index_of("slot", slot);
    kvprim_store_desc desc = {};
    desc.slot = slots.data, desc.slot_type = slots.type, desc.slot_stride = slots.stride;
    desc.slot_base = base, desc.count = slots.count, desc.rejected = call.counter(rejected);
    if (const Named *const named = preset_named(cache_dtype)) {
        EXPECT(!v_cache && !k_scale && !v_scale && !k_scale_cache && !v_scale_cache && !how.inverse, cache_dtype,
               " takes neither v_cache nor scales: k_cache holds all of it");
        call.takes("k", *k);
        if (v)
            call.takes("v", *v);
        kvprim_layout preset = {};
        find_preset(preset, *named, "k_cache", *k_cache, layout);
        EXPECT(preset.v_elements != 0 || !v, cache_dtype, " has no v");
        const Parts from(preset, "k", *k, "v", v);
        EXPECT(preset.v_elements == 0 || from.v.table.data || k->numel == 0, "v is None, but a row of k has only ",
               preset.k_elements, " elements");
        desc.k = from.k.table, desc.k_cache = preset.k_cache, desc.k_bytes = from.k.bytes;
        if (from.v.table.data)
            desc.v = from.v.table, desc.v_cache = preset.v_cache, desc.v_bytes = from.v.bytes;
        return call.run(kvprim_store, kvprim_cuda_store, desc);
    }
    EXPECT(v.has_value() == v_cache.has_value(), "v and v_cache must both be tensors or both be None");
    EXPECT(v || (!v_scale && !v_scale_cache), "v_scale or v_scale_cache is given, but v is None");
    StoreSide k_side = {"k", "k_cache", "k_scale", "k_scale_cache", k, k_cache, k_scale, k_scale_cache};
    k_side.describe(call, layout, cache_dtype, how, desc.k, desc.k_cache, desc.k_bytes);
    StoreSide v_side = {"v", "v_cache", "v_scale", "v_scale_cache", v, v_cache, v_scale, v_scale_cache};
    if (v)
        v_side.describe(call, layout, cache_dtype, how, desc.v, desc.v_cache, desc.v_bytes);
    call.run(kvprim_store, kvprim_cuda_store, desc);
}

/* ---- transfer ---- */

/* One side of a transfer: the geometry of its layers, and where they start. */
struct Side {
    const char *name;
    std::vector<Tensor> tensors;
    Layout layout;
    Rows rows;
    std::vector<void *> pointers;
    void *const *device_pointers = nullptr;
    int64_t layers = 0;

    void *const *host() const
    {
        return device_pointers ? nullptr : pointers.data();
    }

    /* The pointers, `bytes` further on. */
    std::vector<void *> beyond(int64_t bytes) const
    {
        std::vector<void *> moved(pointers);
        for (void *&pointer : moved)
            pointer = static_cast<char *>(pointer) + bytes;
        return moved;
    }
};

void *const *pointers_of(const Call &call, const char *name, const Tensor &table)
{
    call.takes(name, table);
    EXPECT(table.itemsize() == 8 && table.dtype.is_integer() && table.dims == 1 && table.is_contiguous(), name, " is ",
           table.dtype, " of shape ", sizes_of(table), ", not packed pointers as uint64 or int64");
    return static_cast<void *const *>(table.data);
}

Side side_of(Call &call, const char *name, std::vector<Tensor> tensors, const char *layout_name, Text layout,
             const char *table_name, const MaybeTensor &table, Text dtype)
{
    EXPECT(!tensors.empty(), name, " has no tensors");
    Side side = {name, std::move(tensors), layout_of(layout_name, layout), {}, {}, nullptr, 0};
    const Tensor &first = side.tensors[0];
    if (!preset_named(dtype))
        side.rows = rows_of_cache(name, first, side.layout, dtype);
    side.layers = static_cast<int64_t>(side.tensors.size());
    for (const Tensor &tensor : side.tensors) {
        call.takes_pinned(name, tensor);
        EXPECT(tensor.dims == first.dims && tensor.dtype == first.dtype &&
                   std::equal(tensor.size, tensor.size + first.dims, first.size) &&
                   std::equal(tensor.stride, tensor.stride + first.dims, first.stride),
               name, " holds layers of different shapes, strides or dtypes");
        side.pointers.push_back(tensor.data);
    }
    if (table) {
        side.device_pointers = pointers_of(call, table_name, *table);
        EXPECT(table->numel > 0 && (side.layers == 1 || side.layers == table->numel), name, " has ", side.layers,
               " tensors, but ", table_name, " ", table->numel, " pointers");
        side.layers = table->numel;
    }
    return side;
}

/* Sets the indices of both sides. Those in the CPU's memory are read before the call returns. */
void set_indices(kvprim_transfer_desc &desc, const Call &call, const MaybeTensor &dst, const MaybeTensor &src)
{
    const Index to = dst ? index_of("dst_index", *dst) : Index(), from = src ? index_of("src_index", *src) : Index();
    EXPECT(!dst || !src || to.count == from.count, "dst_index has ", to.count, " elements, but src_index ", from.count);
    EXPECT(!dst || !src || dst->device == src->device, "dst_index is on ", device_name(dst->device),
           ", but src_index on ", device_name(src->device));
    const bool on_cpu = (dst && dst->device == CPU) || (src && src->device == CPU);
    if (!on_cpu && dst)
        call.takes("dst_index", *dst);
    if (!on_cpu && src)
        call.takes("src_index", *src);
    desc.host_index = on_cpu;
    desc.dst_index = to.data, desc.dst_index_type = to.type, desc.dst_index_stride = to.stride;
    desc.src_index = from.data, desc.src_index_type = from.type, desc.src_index_stride = from.stride;
    desc.count = dst ? to.count : src ? from.count : desc.src.rows;
}

/* The GPU that takes part, or the CPU. */
int32_t device_of(const std::vector<Tensor> &dst, const std::vector<Tensor> &src, const MaybeTensor &dst_layers,
                  const MaybeTensor &src_layers)
{
    for (const MaybeTensor *const table : {&dst_layers, &src_layers})
        if (*table)
            return (*table)->device;
    for (const std::vector<Tensor> *const tensors : {&dst, &src})
        for (const Tensor &tensor : *tensors)
            if (tensor.device != CPU)
                return tensor.device;
    return CPU;
}

/* Between rows of k and v beside each other and a whole format: what it quantises, then what it copies. */
void transfer_preset(Call &call, kvprim_transfer_desc &desc, const Side &to, const Side &from, Text dst_dtype,
                     Text src_dtype, const MaybeTensor &dst_index, const MaybeTensor &src_index)
{
    const bool into = preset_named(dst_dtype) != nullptr;
    const Side &whole = into ? to : from, &plain = into ? from : to;
    EXPECT(!to.device_pointers && !from.device_pointers, "a transfer of a whole format needs layers listed");
    EXPECT((into ? src_dtype : dst_dtype) == "auto", "one side of a transfer in a whole format has its name, the other "
                                                     "\"auto\"; to move such rows as they are, leave both at \"auto\"");
    kvprim_layout preset = {};
    find_preset(preset, *preset_named(into ? dst_dtype : src_dtype), whole.name, whole.tensors[0], whole.layout);
    Parts parts(preset, plain.name, plain.tensors[0], nullptr, std::nullopt, plain.layout);
    EXPECT(plain.tensors[0].numel == 0 || parts.v.bytes || !preset.v_elements, "a row of ", plain.name, " has ",
           parts.k.elements, " elements, but this format ", preset.k_elements, " and ", preset.v_elements);
    std::vector<void *> pointers[2];
    for (const bool copied : {false, true}) {
        kvprim_table &whole_table = copied ? preset.v_cache : preset.k_cache;
        kvprim_table &plain_table = copied ? parts.v.table : parts.k.table;
        if (!plain_table.data)
            continue;
        for (const Side *const side : {&to, &from}) {
            const kvprim_table &table = side == &whole ? whole_table : plain_table;
            pointers[side == &from] =
                side->beyond(static_cast<char *>(table.data) - static_cast<char *>(side->pointers[0]));
        }
        desc.dst = into ? whole_table : plain_table, desc.src = into ? plain_table : whole_table;
        desc.dst_layers = pointers[0].data(), desc.src_layers = pointers[1].data();
        desc.row_bytes = copied ? parts.v.bytes : into ? parts.k.bytes : preset.k_elements;
        set_indices(desc, call, dst_index, src_index);
        call.run(kvprim_transfer, kvprim_cuda_transfer, desc);
        desc.rejected = nullptr; // counted once
    }
}

void transfer(Arguments &a)
{
    std::vector<Tensor> dst = a.tensors(), src = a.tensors();
    const MaybeTensor dst_index = a.maybe_tensor(), src_index = a.maybe_tensor();
    const Text dst_layout = a.text(), src_layout = a.text();
    const MaybeTensor dst_layers = a.maybe_tensor(), src_layers = a.maybe_tensor();
    const bool same_cache = a.boolean();
    Call call(a, device_of(dst, src, dst_layers, src_layers), false, a.integer());
    const MaybeTensor rejected = a.maybe_tensor();
    const Text dst_dtype = a.text(), src_dtype = a.text();
    const MaybeTensor dst_scale = a.maybe_tensor(), src_scale = a.maybe_tensor();
    const bool scale_inverse = a.boolean(), to_whole = preset_named(dst_dtype), from_whole = preset_named(src_dtype);
    const Side to = side_of(call, "dst", std::move(dst), "dst_layout", dst_layout, "dst_layers", dst_layers, dst_dtype);
    const Side from =
        side_of(call, "src", std::move(src), "src_layout", src_layout, "src_layers", src_layers, src_dtype);
    EXPECT(to.layers == from.layers, "dst has ", to.layers, " layers, but src ", from.layers);
    kvprim_transfer_desc desc = {};
    desc.layers = static_cast<int32_t>(std::min<int64_t>(to.layers, INT32_MAX));
    desc.same_cache = same_cache;
    desc.rejected = call.counter(rejected);
    if (to_whole || from_whole) {
        EXPECT(!dst_scale && !src_scale && !scale_inverse, to_whole ? dst_dtype : src_dtype, " takes no scales");
        return transfer_preset(call, desc, to, from, dst_dtype, src_dtype, dst_index, src_index);
    }
    kvprim_format formats[2];
    desc.dst = to.rows.table, desc.src = from.rows.table;
    desc.row_bytes = row_bytes(to.rows, from.rows);
    const bool asked = dst_dtype != "auto" || src_dtype != "auto" || dst_scale || src_scale;
    if (converts("dst", to.tensors[0], to.rows, "src", from.tensors[0], from.rows, asked)) {
        formats[0] = format_of("dst", to.tensors[0], dst_dtype);
        formats[1] = format_of("src", from.tensors[0], src_dtype);
        EXPECT(!formats[0].scale_min && !formats[1].scale_min, "transfer has no scale caches");
        formats[0].scale_inverse = scale_inverse;
        if (dst_scale)
            set_scale(formats[0], call, "dst_scale", *dst_scale, to.rows.elements, to.layers);
        if (src_scale)
            set_scale(formats[1], call, "src_scale", *src_scale, from.rows.elements, from.layers);
        desc.dst.format = &formats[0], desc.src.format = &formats[1];
    }
    desc.dst_layers = to.host(), desc.src_layers = from.host();
    desc.dst_device_layers = to.device_pointers, desc.src_device_layers = from.device_pointers;
    set_indices(desc, call, dst_index, src_index);
    call.run(kvprim_transfer, kvprim_cuda_transfer, desc);
}

/* ---- copy and unpack ---- */

/* Whether the tensors' elements lie in the same order, without gaps. */
bool same_order(const Tensor &a, const Tensor &b)
{
    if (a.dims != b.dims || !std::equal(a.size, a.size + a.dims, b.size))
        return false;
    return (a.is_contiguous() && b.is_contiguous()) ||
           (std::equal(a.stride, a.stride + a.dims, b.stride) && a.is_dense());
}

void copy(Arguments &a)
{
    const std::vector<Tensor> dst = a.tensors(), src = a.tensors();
    EXPECT(dst.size() == src.size(), "dst has ", static_cast<int64_t>(dst.size()), " tensors, but src ",
           static_cast<int64_t>(src.size()));
    Call call(a, device_of(dst, src, std::nullopt, std::nullopt));
    std::vector<kvprim_copy_item> items(dst.size());
    for (size_t i = 0; i < dst.size(); i++) {
        call.takes_pinned("dst", dst[i]);
        call.takes_pinned("src", src[i]);
        EXPECT(dst[i].dtype == src[i].dtype && same_order(dst[i], src[i]), "dst[", static_cast<int64_t>(i), "] is ",
               dst[i].dtype, " ", sizes_of(dst[i]), " with strides ", strides_of(dst[i]), ", but src[",
               static_cast<int64_t>(i), "] ", src[i].dtype, " ", sizes_of(src[i]), " with strides ",
               strides_of(src[i]));
        EXPECT(src[i].numel == 0 || src[i].data, "src[", static_cast<int64_t>(i), "] has no memory"); // else: zeros
        items[i] = {src[i].data, dst[i].data, static_cast<uint64_t>(dst[i].numel * dst[i].itemsize())};
    }
    kvprim_copy_desc desc = {};
    desc.items = items.data(), desc.count = items.size();
    call.run(kvprim_copy, kvprim_cuda_copy, desc);
}

/* A tensor [count, columns] of int64 on the CPU, packed: an array that kvprim reads during the call. */
template <class Item> const Item *items_of(const char *name, const Tensor &tensor, const char *columns)
{
    EXPECT(tensor.device == CPU && tensor.dtype == INT64 && tensor.dims == 2 &&
               tensor.size[1] == static_cast<int64_t>(sizeof(Item) / 8) && tensor.is_contiguous(),
           name, " is ", tensor.dtype, " of shape ", sizes_of(tensor), " on ", device_name(tensor.device),
           ", not packed int64 [count, ", columns, "] on cpu");
    return static_cast<const Item *>(tensor.data);
}

void unpack(Arguments &a)
{
    const Tensor dst = a.tensor(), src = a.tensor(), fragments = a.tensor();
    Call call(a, device_of({dst}, {src}, std::nullopt, std::nullopt));
    kvprim_unpack_desc desc = {};
    for (const auto &[name, tensor] : {std::pair("dst", &dst), {"src", &src}}) {
        call.takes_pinned(name, *tensor);
        EXPECT(tensor->is_contiguous(), name, " has sizes ", sizes_of(*tensor), " and strides ", strides_of(*tensor),
               ": it must be contiguous");
    }
    desc.dst = dst.data, desc.dst_bytes = static_cast<uint64_t>(dst.numel * dst.itemsize());
    desc.src = src.data, desc.src_bytes = static_cast<uint64_t>(src.numel * src.itemsize());
    desc.fragments = items_of<kvprim_fragment>("fragments", fragments, "(src_offset, dst_offset, bytes)");
    desc.count = static_cast<size_t>(fragments.size[0]);
    call.run(kvprim_unpack, kvprim_cuda_unpack, desc);
}

/* ---- slots ---- */

/* An optional array of one token type, checked against the others. */
const void *tokens_of(const Call &call, const char *name, const MaybeTensor &tensor, int64_t count,
                      kvprim_index_type &type)
{
    if (!tensor)
        return nullptr;
    call.takes(name, *tensor);
    const Index tokens = index_of(name, *tensor);
    EXPECT(tokens.stride == 1, name, " has stride ", tokens.stride, ", not 1");
    EXPECT(tokens.count == count, name, " has ", tokens.count, " elements, not ", count);
    EXPECT(type == 0 || type == tokens.type, name, " is ", tensor->dtype, ", but another argument is not");
    type = tokens.type;
    return tokens.data;
}

/* The page numbers of each request: a row of [requests, pages], or those of [pages] that page_starts says. */
void set_pages(kvprim_slots_desc &desc, const Call &call, const Tensor &pages, const MaybeTensor &page_starts)
{
    const int64_t dims = page_starts ? 1 : 2;
    EXPECT(pages.dtype == INT32 || pages.dtype == INT64, "pages is ", pages.dtype, ", not int32 or int64");
    EXPECT(pages.dims == dims && (pages.size[dims - 1] <= 1 || pages.stride[dims - 1] == 1) &&
               (pages.size[0] <= 1 || pages.stride[0] > 0),
           "pages has shape ", sizes_of(pages), " and strides ", strides_of(pages),
           page_starts ? ", not [pages], packed" : ", not [requests, pages] with packed rows");
    desc.pages = pages.data, desc.pages_type = pages.dtype == INT32 ? KVPRIM_I32 : KVPRIM_I64;
    desc.requests = pages.size[0], desc.max_pages = pages.size[dims - 1];
    desc.pages_stride = dims == 2 && pages.size[0] > 1 ? pages.stride[0] : 0;
    if (page_starts) {
        kvprim_index_type type = desc.pages_type;
        desc.requests = page_starts->numel - 1;
        desc.page_starts = tokens_of(call, "page_starts", page_starts, page_starts->numel, type);
    }
}

void slots(Arguments &a)
{
    const Tensor slot = a.tensor(), pages = a.tensor();
    kvprim_slots_desc desc = {};
    desc.page_rows = a.integer(), desc.rows = a.integer();
    const MaybeTensor request = a.maybe_tensor(), position = a.maybe_tensor(), cu_seqlens = a.maybe_tensor();
    const MaybeTensor starts = a.maybe_tensor(), page_starts = a.maybe_tensor(), rejected = a.maybe_tensor();
    Call call(a, slot.device, a.boolean());
    call.takes("pages", pages);
    const Index to = index_of("slot", slot);
    EXPECT(to.stride == 1, "slot has stride ", to.stride, ", not 1");
    set_pages(desc, call, pages, page_starts);
    kvprim_index_type type = {};
    desc.request = tokens_of(call, "request", request, to.count, type);
    desc.position = tokens_of(call, "position", position, to.count, type);
    desc.cu_seqlens = tokens_of(call, "cu_seqlens", cu_seqlens, desc.requests + 1, type);
    desc.starts = tokens_of(call, "starts", starts, desc.requests, type);
    desc.token_type = type;
    desc.slot = slot.data, desc.slot_type = to.type, desc.count = to.count;
    desc.rejected = call.counter(rejected);
    call.run(kvprim_slots, kvprim_cuda_slots, desc);
}

/* ---- fetch ---- */

/* The set that `memory` is, of so many states, hot rows, tokens and entries. */
kvprim_fetch_set set_of(const Call &call, const Tensor &memory, const std::vector<int64_t> &sizes)
{
    call.takes("memory", memory);
    EXPECT(memory.dtype == UINT8 && memory.is_contiguous(), "memory is ", memory.dtype, " with strides ",
           strides_of(memory), ", not contiguous uint8");
    EXPECT(sizes.size() == 4, "sizes has ", static_cast<int64_t>(sizes.size()), " numbers, not 4");
    kvprim_fetch_set set = {};
    set.memory = memory.data, set.bytes = memory.numel;
    set.states = sizes[0], set.hot_rows = sizes[1], set.tokens = sizes[2], set.entries = sizes[3];
    return set;
}

void fetch_reset(Arguments &a)
{
    const Tensor memory = a.tensor();
    const std::vector<int64_t> sizes = a.integers();
    const int64_t state = a.integer();
    Call call(a, memory.device);
    const kvprim_fetch_set set = set_of(call, memory, sizes);
    call.start([&](const kvprim_cuda_launch *launch) {
        return launch ? kvprim_cuda_fetch_reset(&set, state, launch) : kvprim_fetch_reset(&set, state);
    });
}

/* Tokens of requests, [requests, tokens] or [requests, steps, tokens], a row is packed; rows lie at one distance. */
const void *tokens_wanted(const Call &call, const char *name, const Tensor &tensor, int64_t count,
                          kvprim_index_type &type, int64_t &each, int64_t &stride)
{
    call.takes(name, tensor);
    const int64_t d = tensor.dims - 1, r = d == 2 && tensor.size[1] > 1 ? 1 : 0; // leads from row to row
    EXPECT(tensor.dtype == INT32 || tensor.dtype == INT64, name, " is ", tensor.dtype, ", not int32 or int64");
    EXPECT((d == 1 || d == 2) && tensor.size[0] == count, name, " has shape ", sizes_of(tensor), ", not [", count,
           ", tokens] or [", count, ", steps, tokens], as state says");
    EXPECT((tensor.size[d] <= 1 || tensor.stride[d] == 1) && (tensor.size[r] <= 1 || tensor.stride[r] > 0) &&
               (r == 0 || count <= 1 || tensor.stride[0] == tensor.size[1] * tensor.stride[1]),
           name, " has strides ", strides_of(tensor), ": a row must be packed, and rows at one distance");
    const kvprim_index_type own = tensor.dtype == INT32 ? KVPRIM_I32 : KVPRIM_I64;
    EXPECT(type == 0 || type == own, name, " is ", tensor.dtype, ", but wanted is not");
    type = own, each = tensor.size[d], stride = tensor.size[r] > 1 ? tensor.stride[r] : 0;
    return tensor.data;
}

/* A packed tensor of int32 of so many elements, which is written. */
int32_t *numbers_of(const Call &call, const char *name, const MaybeTensor &tensor, int64_t count)
{
    if (!tensor)
        return nullptr;
    call.takes(name, *tensor);
    EXPECT(tensor->dtype == INT32 && tensor->is_contiguous() && tensor->numel == count, name, " is ", tensor->dtype,
           " of shape ", sizes_of(*tensor), ", not ", count, " packed int32");
    return static_cast<int32_t *>(tensor->data);
}

/* K, or V: a table that may be pinned, and its hot one. Returns the bytes of a row. */
int64_t set_fetched(Call &call, kvprim_table &hot, kvprim_table &table, const char *hot_name, const MaybeTensor &to,
                    const char *name, const MaybeTensor &from, Layout layout)
{
    EXPECT(to.has_value() == from.has_value(), name, " and ", hot_name, " must both be tensors or both be None");
    if (!to)
        return 0;
    call.takes(hot_name, *to);
    call.takes_pinned(name, *from);
    const Rows hot_rows = rows_of(hot_name, *to), rows = rows_of(name, *from, layout);
    EXPECT(to->dtype == from->dtype && hot_rows.bytes == rows.bytes, "a row of ", hot_name, " is ", hot_rows.bytes,
           " bytes of ", to->dtype, ", but one of ", name, " ", rows.bytes, " of ", from->dtype);
    hot = hot_rows.table, table = rows.table;
    return rows.bytes;
}

void fetch(Arguments &a)
{
    const Tensor memory = a.tensor();
    const std::vector<int64_t> sizes = a.integers();
    const Tensor state = a.tensor(), wanted = a.tensor();
    const MaybeTensor rows = a.tensor(), k_hot = a.maybe_tensor(), k = a.maybe_tensor();
    const MaybeTensor v_hot = a.maybe_tensor(), v = a.maybe_tensor();
    const Layout layout = layout_of("layout", a.text());
    const MaybeTensor pages = a.maybe_tensor();
    kvprim_fetch_desc desc = {};
    desc.page_rows = a.integer(), desc.pages_by_state = a.boolean();
    const MaybeTensor fresh = a.maybe_tensor(), fresh_rows = a.maybe_tensor();
    const MaybeTensor plan_src = a.maybe_tensor(), plan_dst = a.maybe_tensor();
    const MaybeTensor hits = a.maybe_tensor(), misses = a.maybe_tensor(), rejected = a.maybe_tensor();
    Call call(a, memory.device, false, a.integer());
    desc.host_rows = a.integer();
    desc.set = set_of(call, memory, sizes);
    call.takes("state", state);
    const Index states = index_of("state", state);
    EXPECT(states.stride == 1, "state has stride ", states.stride, ", not 1");
    desc.count = states.count, desc.state = states.data, desc.state_type = states.type;
    EXPECT(wanted.dims < 3 || wanted.size[1] > 0, "wanted has shape ", sizes_of(wanted), ": no steps");
    desc.wanted = tokens_wanted(call, "wanted", wanted, desc.count, desc.wanted_type, desc.top_k, desc.wanted_stride);
    desc.steps = static_cast<int32_t>(wanted.dims == 3 ? std::min<int64_t>(wanted.size[1], INT32_MAX) : 1);
    if (fresh) {
        EXPECT(fresh->dims == 2, "fresh has shape ", sizes_of(*fresh), ", not [requests, tokens]");
        desc.fresh =
            tokens_wanted(call, "fresh", *fresh, desc.count, desc.wanted_type, desc.fresh_count, desc.fresh_stride);
    }
    if (pages) {
        kvprim_slots_desc like = {};
        set_pages(like, call, *pages, std::nullopt);
        call.takes("pages", *pages);
        EXPECT(desc.pages_by_state || pages->size[0] == desc.count, "pages has shape ", sizes_of(*pages),
               ", but state ", desc.count, " requests");
        EXPECT(!desc.pages_by_state || pages->size[0] == desc.set.states, "pages has shape ", sizes_of(*pages),
               ", but the set ", desc.set.states, " states");
        desc.pages = like.pages, desc.pages_type = like.pages_type;
        desc.max_pages = like.max_pages, desc.pages_stride = like.pages_stride;
    } else {
        EXPECT(desc.page_rows == 1 && !desc.pages_by_state, "page_rows is ", desc.page_rows, " and pages_by_state ",
               text_of(int64_t(desc.pages_by_state)), ", but there are no pages");
        desc.page_rows = 0;
    }
    desc.k_bytes = set_fetched(call, desc.k_hot, desc.k, "k_hot", k_hot, "k", k, layout);
    desc.v_bytes = set_fetched(call, desc.v_hot, desc.v, "v_hot", v_hot, "v", v, layout);
    const int64_t each = desc.fresh_count + desc.steps * desc.top_k;
    desc.rows = numbers_of(call, "rows", rows, wanted.numel);
    desc.fresh_rows = numbers_of(call, "fresh_rows", fresh_rows, desc.count * desc.fresh_count);
    desc.plan_src = numbers_of(call, "plan_src", plan_src, desc.count * each);
    desc.plan_dst = numbers_of(call, "plan_dst", plan_dst, desc.count * each);
    desc.hits = call.counter(hits, "hits"), desc.misses = call.counter(misses, "misses");
    desc.rejected = call.counter(rejected);
    call.run(kvprim_fetch, kvprim_cuda_fetch, desc);
}

/* ---- prefix ---- */

/* How many leading elements of two tensors of the CPU are equal. */
size_t prefix(Arguments &arguments)
{
    const Tensor a = arguments.tensor(), b = arguments.tensor();
    for (const auto &[name, one] : {std::pair("a", &a), {"b", &b}}) {
        const Index index = index_of(name, *one);
        EXPECT(one->device == CPU, name, " is on ", device_name(one->device), ", not on cpu");
        EXPECT(index.stride == 1, name, " has stride ", index.stride, ", not 1; make it contiguous");
    }
    EXPECT(a.dtype == b.dtype, "a is ", a.dtype, ", but b ", b.dtype);
    const auto compare = [&](auto function, auto type) {
        return function(static_cast<decltype(type)>(a.data), static_cast<size_t>(a.numel),
                        static_cast<decltype(type)>(b.data), static_cast<size_t>(b.numel));
    };
    const int32_t *const narrow = nullptr;
    const int64_t *const wide = nullptr;
    return a.dtype == INT32 ? compare(kvprim_prefix_i32, narrow) : compare(kvprim_prefix_i64, wide);
}
} // namespace
