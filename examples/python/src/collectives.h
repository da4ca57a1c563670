/* SPDX-License-Identifier: MIT */
/* The collectives as operators, as operators.h does it for what moves rows. They call libkvprim_nccl.so, which
   kvprim/collectives.py loads before it makes a communicator: all else works without NCCL. */
#include "operators.h"

#include "kvprim_nccl.h"

extern "C" kvprim_comm *kvprim_communicator(int64_t number); // communicators.cu

namespace
{
void *collectives_function(const char *name)
{
    void *const library = dlopen("libkvprim_nccl.so", RTLD_LAZY | RTLD_NOLOAD);
    void *const function = library ? dlsym(library, name) : nullptr;
    EXPECT(function, "there is no kvprim.Communicator in this process, so none can call ", name);
    return function;
}

#define COLLECTIVES(name, ...)                                                                                         \
    [&] {                                                                                                              \
        static const auto function = reinterpret_cast<decltype(&name)>(collectives_function(#name));                   \
        return function(__VA_ARGS__);                                                                                  \
    }()

kvprim_op op_of(Text text)
{
    constexpr std::pair<const char *, kvprim_op> ops[] = {
        {"sum", KVPRIM_SUM}, {"max", KVPRIM_MAX}, {"prod", KVPRIM_PROD}, {"min", KVPRIM_MIN}, {"avg", KVPRIM_AVG}};
    for (const auto &[name, op] : ops)
        if (text == name)
            return op;
    refuse("op is \"", text, "\", not \"sum\", \"max\", \"prod\", \"min\" or \"avg\"");
}

/* Of what is summed; what is only moved goes as bytes. */
kvprim_dtype summed_dtype(const char *name, Dtype dtype)
{
    constexpr std::pair<Dtype, kvprim_dtype> types[] = {
        {UINT8, KVPRIM_U8}, {{0, 8}, KVPRIM_INT8}, {INT32, KVPRIM_INT32}, {INT64, KVPRIM_INT64}, {{2, 64}, KVPRIM_F64}};
    for (const auto &[ours, theirs] : types)
        if (ours == dtype)
            return theirs;
    constexpr Dtype floats[] = {{2, 16}, {4, 16}, FLOAT32, {10, 8}, {12, 8}};
    EXPECT(std::find(std::begin(floats), std::end(floats), dtype) != std::end(floats), name, " is ", dtype,
           ", which no communicator reduces");
    return dtype_of(name, dtype);
}

int64_t bytes_of(const Tensor &tensor)
{
    return tensor.numel * tensor.itemsize();
}

/* A call of one communicator, the operator's first argument, on torch's current stream of its GPU. */
class Collective
{
    Arguments &arguments;

    static kvprim_comm *communicator(int64_t number)
    {
        kvprim_comm *const found = COLLECTIVES(kvprim_communicator, number);
        EXPECT(found, "comm is ", number, ", which is no communicator of this process");
        EXPECT(found->world > 0, "comm is ", number, ", which has ended"); // all zeros: world would divide by 0
        return found;
    }

  public:
    kvprim_comm *const comm;
    const int64_t world;
    CUstream_st *stream = nullptr;

    explicit Collective(Arguments &a) : arguments(a), comm(communicator(a.integer())), world(comm->world)
    {
    }

    void takes(const char *name, const Tensor &tensor) const
    {
        EXPECT(tensor.device == comm->device, name, " is on ", device_name(tensor.device),
               ", but this communicator is of ", device_name(comm->device));
    }

    void takes_packed(const char *name, const Tensor &tensor) const
    {
        takes(name, tensor);
        EXPECT(tensor.is_contiguous(), name, " has sizes ", sizes_of(tensor), " and strides ", strides_of(tensor),
               ": it must be contiguous");
    }

    /* recv has recv_ranks times what is one part, and send send_ranks times that. */
    void takes_pair(const Tensor &recv, int64_t recv_ranks, const Tensor &send, int64_t send_ranks) const
    {
        takes_packed("recv", recv);
        takes_packed("send", send);
        EXPECT(recv.dtype == send.dtype, "recv is ", recv.dtype, ", but send ", send.dtype);
        EXPECT(recv.numel * send_ranks == send.numel * recv_ranks && recv.numel % recv_ranks == 0 &&
                   send.numel % send_ranks == 0,
               "recv has ", recv.numel, " elements, but send ", send.numel, ", on ", world, " ranks");
    }

    int64_t takes_rank(const char *name, int64_t rank) const
    {
        EXPECT(rank >= 0 && rank < world, name, " is ", rank, ", not a rank from 0 to ", world - 1);
        return rank;
    }

    /* How many elements each rank sends, to each other one if `each`, as bytes. Their sums must be the tensors'. */
    std::vector<size_t> counts_of(const std::vector<int64_t> &counts, bool each, const Tensor &recv,
                                  const Tensor &send) const
    {
        const auto wanted = static_cast<size_t>(each ? world * world : world);
        const auto given = static_cast<int64_t>(counts.size());
        EXPECT(counts.size() == wanted, "counts has ", given, " numbers, not ", static_cast<int64_t>(wanted));
        takes_packed("recv", recv);
        takes_packed("send", send);
        EXPECT(recv.dtype == send.dtype, "recv is ", recv.dtype, ", but send ", send.dtype);
        int64_t in = 0, out = 0;
        std::vector<size_t> bytes;
        for (int64_t i = 0; i < given; i++) {
            const int64_t one = counts[static_cast<size_t>(i)];
            const int64_t from = each ? i / world : i, to = each ? i % world : comm->rank;
            EXPECT(one >= 0 && one <= INT64_MAX / 16 / given, "counts[", i, "] is ", one);
            in += to == comm->rank ? one : 0, out += from == comm->rank ? one : 0;
            bytes.push_back(static_cast<size_t>(one * recv.itemsize()));
        }
        EXPECT(recv.numel == in, "recv has ", recv.numel, " elements, but by counts ", in);
        EXPECT(send.numel == out, "send has ", send.numel, " elements, but by counts ", out);
        return bytes;
    }

    /* Runs function(), which enqueues. Everything has been checked. */
    template <class Function> void call(Function function)
    {
        stream = static_cast<CUstream_st *>(arguments.use_gpu(comm->device));
        arguments.begin_call();
        const kvprim_status status = function();
        arguments.end_call();
        expect_ok(status);
    }
};

void all_reduce(Arguments &a)
{
    Collective c(a);
    const Tensor recv = a.tensor();
    const MaybeTensor given = a.maybe_tensor();
    const Tensor &send = given ? *given : recv;
    const kvprim_op op = op_of(a.text());
    c.takes_pair(recv, 1, send, 1);
    const kvprim_dtype dtype = summed_dtype("recv", recv.dtype);
    c.call([&] {
        return COLLECTIVES(kvprim_all_reduce, c.comm, recv.data, send.data, static_cast<size_t>(recv.numel), dtype, op,
                           c.stream);
    });
}

void reduce_scatter(Arguments &a)
{
    Collective c(a);
    const Tensor recv = a.tensor(), send = a.tensor();
    const kvprim_op op = op_of(a.text());
    c.takes_pair(recv, 1, send, c.world);
    const kvprim_dtype dtype = summed_dtype("recv", recv.dtype);
    c.call([&] {
        return COLLECTIVES(kvprim_reduce_scatter, c.comm, recv.data, send.data, static_cast<size_t>(recv.numel), dtype,
                           op, c.stream);
    });
}

void all_gather(Arguments &a)
{
    Collective c(a);
    const Tensor recv = a.tensor(), send = a.tensor();
    c.takes_pair(recv, c.world, send, 1);
    c.call([&] {
        return COLLECTIVES(kvprim_all_gather, c.comm, recv.data, send.data, static_cast<size_t>(bytes_of(send)),
                           KVPRIM_U8, c.stream);
    });
}

void all_gatherv(Arguments &a)
{
    Collective c(a);
    const Tensor recv = a.tensor(), send = a.tensor();
    const std::vector<size_t> counts = c.counts_of(a.integers(), false, recv, send);
    c.call([&] {
        return COLLECTIVES(kvprim_all_gatherv, c.comm, recv.data, send.data, counts.data(), KVPRIM_U8, c.stream);
    });
}

void all_to_all(Arguments &a)
{
    Collective c(a);
    const Tensor recv = a.tensor(), send = a.tensor();
    c.takes_pair(recv, c.world, send, c.world);
    c.call([&] {
        return COLLECTIVES(kvprim_all_to_all, c.comm, recv.data, send.data,
                           static_cast<size_t>(bytes_of(send) / c.world), KVPRIM_U8, c.stream);
    });
}

void all_to_allv(Arguments &a)
{
    Collective c(a);
    const Tensor recv = a.tensor(), send = a.tensor();
    const std::vector<size_t> counts = c.counts_of(a.integers(), true, recv, send);
    c.call([&] {
        return COLLECTIVES(kvprim_all_to_allv, c.comm, recv.data, send.data, counts.data(), KVPRIM_U8, c.stream);
    });
}

void broadcast(Arguments &a)
{
    Collective c(a);
    const Tensor tensor = a.tensor();
    const int64_t root = c.takes_rank("root", a.integer());
    c.takes_packed("tensor", tensor);
    c.call([&] {
        return COLLECTIVES(kvprim_broadcast, c.comm, tensor.data, static_cast<size_t>(bytes_of(tensor)), KVPRIM_U8,
                           static_cast<int32_t>(root), c.stream);
    });
}

void send(Arguments &a)
{
    Collective c(a);
    const Tensor tensor = a.tensor();
    const int64_t peer = c.takes_rank("peer", a.integer());
    c.takes_packed("tensor", tensor);
    c.call([&] {
        return COLLECTIVES(kvprim_send, c.comm, tensor.data, static_cast<size_t>(bytes_of(tensor)), KVPRIM_U8,
                           static_cast<int32_t>(peer), c.stream);
    });
}

void recv(Arguments &a)
{
    Collective c(a);
    const Tensor tensor = a.tensor();
    const int64_t peer = c.takes_rank("peer", a.integer());
    c.takes_packed("tensor", tensor);
    c.call([&] {
        return COLLECTIVES(kvprim_recv, c.comm, tensor.data, static_cast<size_t>(bytes_of(tensor)), KVPRIM_U8,
                           static_cast<int32_t>(peer), c.stream);
    });
}

/* A tensor of all_reduce_norm: [tokens, hidden], whose tokens may lie apart. NULL without one. */
void *tokens_of_norm(const Collective &c, const char *name, const MaybeTensor &tensor, const Tensor &like, Dtype dtype,
                     int64_t &stride)
{
    if (!tensor)
        return nullptr;
    c.takes(name, *tensor);
    EXPECT(tensor->dtype == dtype, name, " is ", tensor->dtype, ", not ", dtype);
    EXPECT(tensor->dims == 2 && tensor->size[0] == like.size[0] && tensor->size[1] == like.size[1], name, " has shape ",
           sizes_of(*tensor), ", but send ", sizes_of(like));
    EXPECT(tensor->size[1] <= 1 || tensor->stride[1] == 1, name, " has strides ", strides_of(*tensor),
           ": a token must be packed");
    stride = tensor->size[0] > 1 ? tensor->stride[0] : 0;
    return tensor->data;
}

/* A scale of each group of each token: float32, or in int32 the exponents of four groups. */
void set_group_scales(const Collective &c, kvprim_norm_desc &desc, const Tensor &scale)
{
    const bool exponents = scale.dtype == INT32;
    const int64_t groups = desc.hidden / desc.scale_group, words = exponents ? (groups + 3) / 4 : groups;
    c.takes("scale", scale);
    EXPECT(scale.dtype == FLOAT32 || exponents, "scale is ", scale.dtype, ", not float32, or int32 for exponents");
    EXPECT(scale.dims == 2 && scale.size[0] == desc.tokens && scale.size[1] == words, "scale has shape ",
           sizes_of(scale), ", not [", desc.tokens, ", ", words, "]");
    desc.scale = static_cast<float *>(scale.data);
    desc.scale_dtype = exponents ? KVPRIM_F8E8M0 : KVPRIM_F32;
    desc.scale_stride = desc.tokens > 1 ? scale.stride[0] : 0;
    desc.scale_group_stride = words > 1 ? scale.stride[1] : 0;
    EXPECT((desc.tokens <= 1 || scale.stride[0] > 0) && (words <= 1 || scale.stride[1] > 0), "scale has strides ",
           strides_of(scale), ": it is expanded; make it contiguous");
}

void all_reduce_norm(Arguments &a)
{
    Collective c(a);
    const MaybeTensor out = a.maybe_tensor();
    const MaybeTensor send = a.tensor();
    const Tensor weight = a.tensor();
    const MaybeTensor residual = a.maybe_tensor(), residual_out = a.maybe_tensor(), sum = a.maybe_tensor();
    const MaybeTensor quantised = a.maybe_tensor(), scale = a.maybe_tensor();
    kvprim_norm_desc desc = {};
    desc.eps = static_cast<float>(a.number());
    desc.scale_per_token = a.boolean(), desc.scale_min = static_cast<float>(a.number());
    desc.weight_plus_one = a.boolean();
    const int64_t group = a.integer();
    desc.scale_group = static_cast<int32_t>(std::clamp<int64_t>(group, -1, INT32_MAX));
    desc.scale_power_of_two = a.boolean();
    EXPECT(send->dims == 2, "send has shape ", sizes_of(*send), ", not [tokens, hidden]");
    const Dtype dtype = send->dtype;
    desc.dtype = summed_dtype("send", dtype);
    desc.tokens = send->size[0], desc.hidden = send->size[1];
    desc.send = tokens_of_norm(c, "send", send, *send, dtype, desc.send_stride);
    desc.residual = tokens_of_norm(c, "residual", residual, *send, dtype, desc.residual_stride);
    desc.sum = tokens_of_norm(c, "sum", sum, *send, dtype, desc.sum_stride);
    desc.residual_out = tokens_of_norm(c, "residual_out", residual_out, *send, dtype, desc.residual_out_stride);
    desc.out = tokens_of_norm(c, "out", out, *send, dtype, desc.out_stride);
    desc.quantised = tokens_of_norm(c, "quantised", quantised, *send, {10, 8}, desc.quantised_stride);
    c.takes_packed("weight", weight);
    EXPECT(weight.dtype == dtype && weight.numel == desc.hidden, "weight is ", weight.dtype, " of ", weight.numel,
           " elements, not ", dtype, " of ", desc.hidden);
    desc.weight = weight.data;
    if (scale && desc.scale_group > 0) {
        set_group_scales(c, desc, *scale);
    } else if (scale) {
        const int64_t scales = desc.scale_per_token ? desc.tokens : 1;
        c.takes_packed("scale", *scale);
        EXPECT(scale->dtype == FLOAT32 && scale->numel == scales, "scale is ", scale->dtype, " of ", scale->numel,
               " elements, not float32 of ", scales);
        desc.scale = static_cast<float *>(scale->data);
    }
    c.call([&] { return COLLECTIVES(kvprim_all_reduce_norm, c.comm, &desc, c.stream); });
}
} // namespace
