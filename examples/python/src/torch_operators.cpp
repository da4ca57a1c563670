/* SPDX-License-Identifier: MIT */
/* The operators for torch's dispatcher, which torch.compile's graphs call: by torch's stable ABI, so that this library
   serves torch 2.10 and every newer one. It uses the C functions below that ABI's C++ classes, which cost a
   reference-counted object for each tensor. kvprim/__init__.py defines the operators. */
#include "collectives.h"

#include <array>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

/* Those of torch without CUDA, and of torch before 2.11, lack these. */
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);
extern "C" int32_t torch_dtype_float8_e8m0fnu();
#pragma weak aoti_torch_get_current_cuda_stream
#pragma weak torch_dtype_float8_e8m0fnu

namespace
{
void expect_torch(AOTITorchError status, const char *what)
{
    EXPECT(status == TORCH_SUCCESS, "kvprim: torch refuses ", what);
}

Dtype dtype_of(int32_t dtype)
{
    static const std::pair<int32_t, Dtype> dtypes[] = {
        {aoti_torch_dtype_uint8(), {1, 8}},
        {aoti_torch_dtype_uint16(), {1, 16}},
        {aoti_torch_dtype_uint32(), {1, 32}},
        {aoti_torch_dtype_uint64(), {1, 64}},
        {aoti_torch_dtype_int8(), {0, 8}},
        {aoti_torch_dtype_int16(), {0, 16}},
        {aoti_torch_dtype_int32(), {0, 32}},
        {aoti_torch_dtype_int64(), {0, 64}},
        {aoti_torch_dtype_float16(), {2, 16}},
        {aoti_torch_dtype_bfloat16(), {4, 16}},
        {aoti_torch_dtype_float32(), {2, 32}},
        {aoti_torch_dtype_float64(), {2, 64}},
        {aoti_torch_dtype_complex64(), {5, 64}},
        {aoti_torch_dtype_complex128(), {5, 128}},
        {aoti_torch_dtype_float8_e5m2(), {12, 8}},
        {aoti_torch_dtype_float8_e5m2fnuz(), {13, 8}},
        {aoti_torch_dtype_float8_e4m3fn(), {10, 8}},
        {aoti_torch_dtype_float8_e4m3fnuz(), {11, 8}},
        {aoti_torch_dtype_bool(), {6, 8}},
        {torch_dtype_float8_e8m0fnu ? torch_dtype_float8_e8m0fnu()
                                    : static_cast<int32_t>(torch::headeronly::ScalarType::Float8_e8m0fnu),
         E8M0}};
    static const auto table = [] {
        std::array<Dtype, 64> by_number = {};
        for (const auto &[theirs, ours] : dtypes)
            if (static_cast<size_t>(theirs) < by_number.size())
                by_number[static_cast<size_t>(theirs)] = ours;
        return by_number;
    }();
    const auto number = static_cast<size_t>(dtype);
    if (number < table.size() && table[number].bits)
        return table[number];
    return {255, static_cast<uint8_t>(8 * aoti_torch_dtype_element_size(dtype))};
}

void delete_tensor(void *owner)
{
    aoti_torch_delete_tensor_object(static_cast<AtenTensorHandle>(owner));
}

} // namespace

/* Whether this is a dense tensor that has memory. Exported, for python_module.cpp. */
extern "C" __attribute__((visibility("default"))) bool kvprim_torch_describe(void *object, void *out)
{
    const auto handle = static_cast<AtenTensorHandle>(object);
    Tensor &tensor = *static_cast<Tensor *>(out);
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0, type = 0, index = 0;
    if (aoti_torch_get_dim(handle, &dims) || aoti_torch_get_sizes(handle, &sizes) ||
        aoti_torch_get_strides(handle, &strides) || aoti_torch_get_dtype(handle, &dtype) ||
        aoti_torch_get_device_type(handle, &type) || aoti_torch_get_data_ptr(handle, &tensor.data))
        return false;
    const bool cuda = type == aoti_torch_device_type_cuda();
    if (cuda && aoti_torch_get_device_index(handle, &index))
        return false;
    tensor.set_sizes(dims, sizes, strides);
    tensor.dtype = dtype_of(dtype);
    tensor.device = cuda ? index : type == aoti_torch_device_type_cpu() ? CPU : NO_DEVICE;
    return true;
}

namespace
{
class TorchArguments final : public Arguments
{
    StableIValue *const begin, *next;
    std::vector<void *> owned;
    std::vector<StringHandle> strings;
    DeviceGuardHandle guard = nullptr;

    Tensor tensor_of(StableIValue value)
    {
        const auto handle = torch::stable::detail::to<AtenTensorHandle>(value);
        owned.push_back(handle);
        Tensor tensor;
        bool defined = false;
        expect_torch(aoti_torch_is_defined(handle, &defined), "a tensor");
        EXPECT(defined, "argument ", next - begin, " is None");
        EXPECT(kvprim_torch_describe(handle, &tensor), "argument ", next - begin, " is no dense tensor with memory");
        tensor.owner = handle;
        return tensor;
    }

  public:
    explicit TorchArguments(StableIValue *stack) : begin(stack), next(stack)
    {
    }
    TorchArguments(const TorchArguments &) = delete;

    ~TorchArguments()
    {
        if (guard)
            aoti_torch_delete_device_guard(guard);
        for (void *const owner : owned)
            delete_tensor(owner);
        for (const StringHandle text : strings)
            torch_delete_string(text);
    }

    /* An optional value is a pointer to one, which we own. */
    bool skip_none() override
    {
        const auto *const value = torch::stable::detail::to<StableIValue *>(*next);
        if (value)
            *next = *value;
        else
            next++;
        delete value;
        return !value;
    }

    Tensor tensor() override
    {
        return tensor_of(*next++);
    }

    /* Calls take(value) with each of a list. */
    template <class Take> void each(Take take)
    {
        const auto list = torch::stable::detail::to<StableListHandle>(*next++);
        size_t count = 0;
        expect_torch(torch_list_size(list, &count), "a list");
        for (size_t i = 0; i < count; i++) {
            StableIValue value = 0;
            expect_torch(torch_list_get_item(list, i, &value), "an item of a list");
            take(value);
        }
        torch_delete_list(list);
    }

    std::vector<Tensor> tensors() override
    {
        std::vector<Tensor> tensors;
        each([&](StableIValue value) { tensors.push_back(tensor_of(value)); });
        return tensors;
    }

    std::vector<int64_t> integers() override
    {
        std::vector<int64_t> numbers;
        each([&](StableIValue value) { numbers.push_back(torch::stable::detail::to<int64_t>(value)); });
        return numbers;
    }

    int64_t integer() override
    {
        return torch::stable::detail::to<int64_t>(*next++);
    }

    double number() override
    {
        return torch::stable::detail::to<double>(*next++);
    }

    Text text() override
    {
        const auto text = torch::stable::detail::to<StringHandle>(*next++);
        strings.push_back(text);
        const char *data = nullptr;
        size_t size = 0;
        expect_torch(torch_string_c_str(text, &data), "a string");
        expect_torch(torch_string_length(text, &size), "a string");
        return {data, size};
    }

    void *use_gpu(int32_t gpu) override
    {
        int32_t current = -1;
        void *stream = nullptr;
        expect_torch(aoti_torch_get_current_device_index(&current), "the current device");
        if (current != gpu)
            expect_torch(aoti_torch_create_device_guard(gpu, &guard), "a device");
        EXPECT(aoti_torch_get_current_cuda_stream, "this torch was built without CUDA");
        expect_torch(aoti_torch_get_current_cuda_stream(gpu, &stream), "its current stream");
        return stream;
    }

    void keep(const std::vector<void *> &owners, void *stream) override
    {
        static Keeper &keeper = *new Keeper(delete_tensor); // lives as long as the process
        for (void *const owner : owners)
            *std::find(owned.begin(), owned.end(), owner) = nullptr;
        keeper.keep(owners, stream);
    }
};

template <void (*call)(Arguments &)> void boxed(StableIValue *stack, uint64_t, uint64_t)
{
    TorchArguments arguments(stack);
    call(arguments);
}

/* A collective's last argument: a tensor that each of them says it writes, so that torch.compile keeps all of them, in
   their order, as the other ranks need. */
template <void (*call)(Arguments &)> void ordered(Arguments &arguments)
{
    call(arguments);
    arguments.tensor();
}

/* A GPU's operators also take tensors of the CPU; if all lie there, torch picks those of the CPU. */
void implement(torch::stable::detail::StableLibrary &m)
{
    m.impl("gather", &boxed<gather>);
    m.impl("store", &boxed<store>);
    m.impl("transfer", &boxed<transfer>);
    m.impl("copy", &boxed<copy>);
    m.impl("unpack", &boxed<unpack>);
    m.impl("slots", &boxed<slots>);
    m.impl("fetch", &boxed<fetch>);
    m.impl("fetch_reset", &boxed<fetch_reset>);
    m.impl("all_reduce", &boxed<ordered<all_reduce>>);
    m.impl("reduce_scatter", &boxed<ordered<reduce_scatter>>);
    m.impl("all_gather", &boxed<ordered<all_gather>>);
    m.impl("all_gatherv", &boxed<ordered<all_gatherv>>);
    m.impl("all_to_all", &boxed<ordered<all_to_all>>);
    m.impl("all_to_allv", &boxed<ordered<all_to_allv>>);
    m.impl("broadcast", &boxed<ordered<broadcast>>);
    m.impl("send", &boxed<ordered<send>>);
    m.impl("recv", &boxed<ordered<recv>>);
    m.impl("all_reduce_norm", &boxed<ordered<all_reduce_norm>>);
}
} // namespace

STABLE_TORCH_LIBRARY_IMPL(kvprim, CPU, m)
{
    implement(m);
}

STABLE_TORCH_LIBRARY_IMPL(kvprim, CUDA, m)
{
    implement(m);
}
