/* SPDX-License-Identifier: MIT */
/* The operators for TVM-FFI, which SGLang and mini-sglang load: tvm_ffi.load_module(kvprim.ffi_library()). Each takes
   all of its arguments in the order of kvprim/__init__.py's schemas (prefix: a and b), and torch's tensors, or whatever
   TVM-FFI takes; the current GPU must be that of the tensors, and the caller keeps pinned tensors until the stream has
   done with them, because TVM-FFI lends tensors without their owners. Collectives take comm.number of a
   kvprim.Communicator first. */
#include "collectives.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace
{
class FfiArguments final : public Arguments
{
    const tvm::ffi::AnyView *next, *const end;
    std::vector<tvm::ffi::String> texts;

    const tvm::ffi::AnyView &pop()
    {
        if (next == end)
            refuse("kvprim: an argument is missing");
        return *next++;
    }

    static Tensor tensor_of(const tvm::ffi::TensorView &view)
    {
        Tensor tensor;
        tensor.data = static_cast<char *>(view.data_ptr()) + view.byte_offset();
        tensor.set_sizes(view.ndim(), view.shape().data(), view.strides().data());
        tensor.set_dtype(view.dtype().code, view.dtype().bits, view.dtype().lanes);
        const auto type = view.device().device_type;
        tensor.device = type == kDLCUDA                         ? view.device().device_id
                        : type == kDLCPU || type == kDLCUDAHost ? CPU
                                                                : NO_DEVICE;
        return tensor;
    }

  public:
    FfiArguments(const TVMFFIAny *arguments, int32_t count)
        : next(reinterpret_cast<const tvm::ffi::AnyView *>(arguments)), end(next + count)
    {
        texts.reserve(static_cast<size_t>(count)); // text() returns views of them
    }

    bool skip_none() override
    {
        const bool none = next != end && *next == nullptr;
        next += none;
        return none;
    }

    Tensor tensor() override
    {
        return tensor_of(pop().cast<tvm::ffi::TensorView>());
    }

    std::vector<Tensor> tensors() override
    {
        std::vector<Tensor> tensors;
        for (const tvm::ffi::Tensor &tensor : pop().cast<tvm::ffi::Array<tvm::ffi::Tensor>>())
            tensors.push_back(tensor_of(tvm::ffi::TensorView(tensor)));
        return tensors;
    }

    std::vector<int64_t> integers() override
    {
        const auto list = pop().cast<tvm::ffi::Array<int64_t>>();
        return {list.begin(), list.end()};
    }

    int64_t integer() override
    {
        return pop().cast<int64_t>();
    }

    double number() override
    {
        return pop().cast<double>();
    }

    Text text() override
    {
        texts.push_back(pop().cast<tvm::ffi::String>());
        return {texts.back().data(), texts.back().size()};
    }

    void *use_gpu(int32_t gpu) override
    {
        int current = -1;
        const int status = DRIVER(cuCtxGetDevice, &current);
        EXPECT(status == 0 && current == gpu, "the tensors are on ", device_name(gpu), ", but the current GPU is ",
               device_name(current));
        return TVMFFIEnvGetStream(kDLCUDA, gpu);
    }

    void keep(const std::vector<void *> &, void *) override
    {
    }
};
} // namespace

#define EXPORT(operation, result_of)                                                                                   \
    extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##operation(void *, const TVMFFIAny *arguments,    \
                                                                                int32_t count, TVMFFIAny *result)      \
    {                                                                                                                  \
        TVM_FFI_SAFE_CALL_BEGIN();                                                                                     \
        FfiArguments ours(arguments, count);                                                                           \
        *reinterpret_cast<tvm::ffi::Any *>(result) = (result_of);                                                      \
        TVM_FFI_SAFE_CALL_END();                                                                                       \
    }

EXPORT(gather, (gather(ours), true))
EXPORT(store, (store(ours), true))
EXPORT(transfer, (transfer(ours), true))
EXPORT(copy, (copy(ours), true))
EXPORT(unpack, (unpack(ours), true))
EXPORT(slots, (slots(ours), true))
EXPORT(fetch, (fetch(ours), true))
EXPORT(fetch_reset, (fetch_reset(ours), true))
EXPORT(prefix, static_cast<int64_t>(prefix(ours)))
EXPORT(all_reduce, (all_reduce(ours), true))
EXPORT(reduce_scatter, (reduce_scatter(ours), true))
EXPORT(all_gather, (all_gather(ours), true))
EXPORT(all_gatherv, (all_gatherv(ours), true))
EXPORT(all_to_all, (all_to_all(ours), true))
EXPORT(all_to_allv, (all_to_allv(ours), true))
EXPORT(broadcast, (broadcast(ours), true))
EXPORT(send, (send(ours), true))
EXPORT(recv, (recv(ours), true))
EXPORT(all_reduce_norm, (all_reduce_norm(ours), true))
