/* SPDX-License-Identifier: MIT */
/* The operators for eager calls from Python, past torch's dispatcher, which takes several times as long as the call:
   streams, and if need be tensors, by DLPack's exchange API, which torch has since 2.10. Python's stable ABI, 3.10 or
   newer. A function returns False if it leaves the call to the dispatcher: for subclasses of Tensor (as those that
   torch.compile traces), inside torch's dispatch modes, for tensors of a GPU that is not the current one, and where
   torch does not describe a tensor. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include "collectives.h"

namespace
{
/* ---- DLPack 1.2, as far as it is used here ---- */

struct DLTensor {
    void *data;
    int32_t device_type, device_id, ndim;
    Dtype dtype;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct DLPackExchangeAPI {
    uint32_t major, minor;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*tensor_of)(void *object, DLTensor *tensor);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
};

enum { DL_CPU = 1, DL_CUDA = 2 };

/* ---- what setup() is given ---- */

const DLPackExchangeAPI *dlpack;
PyTypeObject *tensor_type, *parameter_type;
PyObject *modes; // tells how many of torch's dispatch modes are active

/* torch's stable ABI describes a tensor faster than DLPack's function, which counts references and takes the GIL for
   each: a copy of 64 tensors takes 10.5 to 15.3 us of the host instead of 14.7 to 22.5 (H200). Only where a tensor of
   C++ lies in an object is no part of that ABI: setup() finds it, and if it does not, DLPack serves. */
bool (*torch_describe)(void *handle, void *tensor);
Py_ssize_t handle_offset;

struct UseDispatcher {
};
struct PythonError { // is set
};

void release_object(void *object)
{
    Py_DecRef(static_cast<PyObject *>(object));
}

class PythonArguments final : public Arguments
{
    PyObject *const *next, *const *const end;
    PyThreadState *thread = nullptr;

    PyObject *pop()
    {
        if (next == end)
            refuse("kvprim: an argument is missing");
        return *next++;
    }

    static void describe(Tensor &tensor, PyObject *object)
    {
        PyTypeObject *const type = Py_TYPE(object);
        tensor.owner = object;
        if (type != tensor_type && type != parameter_type)
            throw UseDispatcher();
        if (handle_offset) {
            if (!torch_describe(reinterpret_cast<char *>(object) + handle_offset, &tensor))
                throw UseDispatcher();
            return;
        }
        DLTensor dl;
        if (dlpack->tensor_of(object, &dl) != 0)
            throw UseDispatcher();
        tensor.data = static_cast<char *>(dl.data) + dl.byte_offset;
        tensor.set_sizes(dl.ndim, dl.shape, dl.strides);
        tensor.set_dtype(dl.dtype.code, dl.dtype.bits, dl.lanes);
        tensor.device = dl.device_type == DL_CUDA ? dl.device_id : dl.device_type == DL_CPU ? CPU : NO_DEVICE;
    }

  public:
    PythonArguments(PyObject *const *arguments, Py_ssize_t count) : next(arguments), end(arguments + count)
    {
        PyObject *const active = PyObject_CallNoArgs(modes);
        const long count_of_modes = active ? PyLong_AsLong(active) : 0;
        Py_XDECREF(active);
        if (count_of_modes != 0)
            throw UseDispatcher();
    }

    bool skip_none() override
    {
        const bool none = next != end && *next == Py_None;
        next += none;
        return none;
    }

    Tensor tensor() override
    {
        Tensor tensor;
        describe(tensor, pop());
        return tensor;
    }

    /* Calls take(i, object) with each of a list or a tuple, after reserve(how many). */
    template <class Reserve, class Take> void each(Reserve reserve, Take take)
    {
        PyObject *const list = pop();
        PyObject *(*const item)(PyObject *, Py_ssize_t) = PyList_Check(list) ? PyList_GetItem : PyTuple_GetItem;
        if (item == PyTuple_GetItem && !PyTuple_Check(list))
            throw UseDispatcher();
        const Py_ssize_t count = PySequence_Size(list);
        reserve(static_cast<size_t>(count));
        for (Py_ssize_t i = 0; i < count; i++)
            take(static_cast<size_t>(i), item(list, i));
    }

    static int64_t integer_of(PyObject *object)
    {
        const int64_t number = PyLong_AsLongLong(object);
        if (number == -1 && PyErr_Occurred())
            throw PythonError();
        return number;
    }

    std::vector<Tensor> tensors() override
    {
        std::vector<Tensor> tensors;
        each([&](size_t n) { tensors.resize(n); }, [&](size_t i, PyObject *object) { describe(tensors[i], object); });
        return tensors;
    }

    std::vector<int64_t> integers() override
    {
        std::vector<int64_t> numbers;
        each([&](size_t n) { numbers.resize(n); },
             [&](size_t i, PyObject *object) { numbers[i] = integer_of(object); });
        return numbers;
    }

    int64_t integer() override
    {
        return integer_of(pop());
    }

    double number() override
    {
        const double number = PyFloat_AsDouble(pop());
        if (number == -1 && PyErr_Occurred())
            throw PythonError();
        return number;
    }

    Text text() override
    {
        Py_ssize_t size = 0;
        const char *const data = PyUnicode_AsUTF8AndSize(pop(), &size);
        if (!data)
            throw PythonError();
        return {data, static_cast<size_t>(size)};
    }

    void *use_gpu(int32_t gpu) override
    {
        int current = -1;
        void *stream = nullptr;
        if (DRIVER(cuCtxGetDevice, &current) != 0 || current != gpu ||
            dlpack->current_stream(DL_CUDA, gpu, &stream) != 0)
            throw UseDispatcher();
        return stream;
    }

    void keep(const std::vector<void *> &owners, void *stream) override
    {
        static Keeper &keeper = *new Keeper(release_object); // lives as long as the process
        for (void *const owner : owners)
            Py_IncRef(static_cast<PyObject *>(owner));
        keeper.keep(owners, stream);
    }

    void begin_call() override
    {
        thread = PyEval_SaveThread();
    }

    void end_call() override
    {
        PyEval_RestoreThread(thread);
    }
};

/* ---- what has no operator, because nobody could tell torch.compile what it writes ---- */

/* Layers by pointers and rows by bytes alone. */
void transfer_addresses(Arguments &a)
{
    const Tensor dst = a.tensor(), src = a.tensor();
    const MaybeTensor dst_index = a.maybe_tensor(), src_index = a.maybe_tensor();
    kvprim_transfer_desc desc = {};
    desc.row_bytes = a.integer();
    desc.dst.stride = a.integer(), desc.src.stride = a.integer();
    desc.dst.rows = a.integer(), desc.src.rows = a.integer();
    desc.dst.page_rows = a.integer(), desc.dst.page_stride = a.integer();
    desc.dst.heads = static_cast<int32_t>(std::clamp<int64_t>(a.integer(), -1, INT32_MAX));
    desc.dst.head_stride = a.integer();
    Call call(a, dst.device, false, a.integer());
    desc.dst_device_layers = pointers_of(call, "dst_layers", dst);
    desc.src_device_layers = pointers_of(call, "src_layers", src);
    EXPECT(dst.numel == src.numel, "dst_layers has ", dst.numel, " pointers, but src_layers ", src.numel);
    desc.layers = static_cast<int32_t>(std::min<int64_t>(dst.numel, INT32_MAX));
    desc.rejected = call.counter(a.maybe_tensor());
    set_indices(desc, call, dst_index, src_index);
    call.run(kvprim_transfer, kvprim_cuda_transfer, desc);
}

/* Items of (src, dst, bytes); the bound of addresses is the caller's business. */
void copy_addresses(Arguments &a)
{
    const Tensor items = a.tensor();
    kvprim_copy_desc desc = {};
    desc.items = items_of<kvprim_copy_item>("items", items, "(src, dst, bytes)");
    desc.count = static_cast<size_t>(items.size[0]);
    Call(a, static_cast<int32_t>(a.integer())).run(kvprim_copy, kvprim_cuda_copy, desc);
}

/* ---- functions of the module ---- */

/* Calls function(arguments), which returns an object. */
template <class Function> PyObject *guarded(PyObject *const *arguments, Py_ssize_t count, Function function)
{
    try {
        if (!dlpack)
            refuse("kvprim: no torch");
        PythonArguments ours(arguments, count);
        return function(ours);
    } catch (const UseDispatcher &) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    } catch (const PythonError &) {
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

template <void (*call)(Arguments &)> PyObject *eager(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    return guarded(arguments, count, [](Arguments &ours) {
        call(ours);
        Py_RETURN_TRUE;
    });
}

PyObject *count_prefix(PyObject *, PyObject *const *arguments, Py_ssize_t count)
{
    return guarded(arguments, count, [](Arguments &ours) { return PyLong_FromSize_t(prefix(ours)); });
}

/* The offset of the word in an object of `size` bytes that points to the tensor's data in C++, or 0. */
Py_ssize_t find_handle(PyObject *object, Py_ssize_t size, unsigned long long cdata)
{
    const auto *const words = reinterpret_cast<const uint64_t *>(object);
    for (Py_ssize_t i = sizeof(PyObject) / 8; i < size / 8; i++)
        if (words[i] == cdata)
            return 8 * i;
    return 0;
}

/* setup(torch.Tensor, torch.nn.Parameter, a function that counts torch's dispatch modes, a Tensor, its _cdata, a
   Parameter, its _cdata, bytes of a Tensor, the file of torch_operators.cpp's library) */
PyObject *setup(PyObject *, PyObject *arguments)
{
    PyObject *tensor = nullptr, *parameter = nullptr, *count_modes = nullptr, *one = nullptr, *other = nullptr;
    unsigned long long one_cdata = 0, other_cdata = 0;
    Py_ssize_t size = 0;
    const char *path = nullptr;
    if (!PyArg_ParseTuple(arguments, "OOOOKOKns", &tensor, &parameter, &count_modes, &one, &one_cdata, &other,
                          &other_cdata, &size, &path))
        return nullptr;
    if (kvprim_version() != KVPRIM_VERSION) {
        PyErr_SetString(PyExc_ImportError,
                        "kvprim: another copy of kvprim in this process, of another version, is in the way");
        return nullptr;
    }
    PyObject *const capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
    const void *const api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
    if (!api)
        return nullptr;
    dlpack = static_cast<const DLPackExchangeAPI *>(api);
    if (dlpack->major != 1 || !dlpack->tensor_of) {
        dlpack = nullptr;
        PyErr_SetString(PyExc_ImportError, "kvprim: this torch's DLPack exchange API is of another version");
        return nullptr;
    }
    for (PyObject *const kept : {tensor, parameter, count_modes})
        Py_IncRef(kept);
    tensor_type = reinterpret_cast<PyTypeObject *>(tensor);
    parameter_type = reinterpret_cast<PyTypeObject *>(parameter);
    modes = count_modes;
    void *const operators = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    void *const describe = operators ? dlsym(operators, "kvprim_torch_describe") : nullptr;
    const Py_ssize_t offset = find_handle(one, size, one_cdata);
    if (describe && offset == find_handle(other, size, other_cdata))
        torch_describe = reinterpret_cast<decltype(torch_describe)>(describe), handle_offset = offset;
    return PyBool_FromLong(handle_offset != 0);
}

template <void (*call)(Arguments &)> PyMethodDef method(const char *name)
{
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&eager<call>)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method<gather>("gather"),
    method<store>("store"),
    method<transfer>("transfer"),
    method<copy>("copy"),
    method<unpack>("unpack"),
    method<slots>("slots"),
    method<fetch>("fetch"),
    method<fetch_reset>("fetch_reset"),
    method<all_reduce>("all_reduce"),
    method<reduce_scatter>("reduce_scatter"),
    method<all_gather>("all_gather"),
    method<all_gatherv>("all_gatherv"),
    method<all_to_all>("all_to_all"),
    method<all_to_allv>("all_to_allv"),
    method<broadcast>("broadcast"),
    method<send>("send"),
    method<recv>("recv"),
    method<all_reduce_norm>("all_reduce_norm"),
    method<transfer_addresses>("transfer_addresses"),
    method<copy_addresses>("copy_addresses"),
    {"prefix", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&count_prefix)), METH_FASTCALL, nullptr},
    {"setup", setup, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_eager", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
} // namespace

PyMODINIT_FUNC PyInit__eager()
{
    return PyModule_Create(&module);
}
