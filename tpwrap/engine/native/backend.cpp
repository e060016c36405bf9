#include "backend.hpp"

#include <thread>

namespace torchpass {
namespace {

using c10d::OpType;

Tensors flatten(const std::vector<Tensors>& nested) {
  Tensors flat;
  for (auto& inner : nested) flat.insert(flat.end(), inner.begin(), inner.end());
  return flat;
}

std::vector<size_t> sizes_of(const std::vector<Tensors>& nested) {
  std::vector<size_t> sizes;
  for (auto& inner : nested) sizes.push_back(inner.size());
  return sizes;
}

std::vector<Tensors> unflatten(const Tensors& flat, const std::vector<size_t>& sizes) {
  std::vector<Tensors> nested;
  auto at = flat.begin();
  for (auto size : sizes) {
    nested.emplace_back(at, at + static_cast<std::ptrdiff_t>(size));
    at += static_cast<std::ptrdiff_t>(size);
  }
  return nested;
}

void copy_raw(const Tensor& to, const Tensor& from) { to.variable_data().copy_(from.detach()); }

// Every slot of `out` gets this rank's own contribution: sane data of the right size.
void echo_into_slots(const Tensor& out, const Tensor& in, int size) {
  copy_raw(out.view({size, -1}), in.reshape({1, -1}).expand({size, -1}));
}

}  // namespace

bool JournaledWork::wait(std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (!future_->completed()) {
      TORCH_CHECK(std::chrono::steady_clock::now() < end, "torchpass: the collective did not complete within ",
                  timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  future_->wait();
  if (future_->hasError()) std::rethrow_exception(future_->exception_ptr());
  return true;
}

WorkPtr JournaledBackend::submit(Call call) {
  const auto type = call.type;
  Tensors out = call.out;
  WorkPtr inner;
  const bool any_source = type == OpType::RECVANYSOURCE;
  const auto step = group_->step();
  auto future = group_->submit(std::move(call), any_source ? &inner : nullptr);
  attendance_.issued(type, step, future);
  return c10::make_intrusive<JournaledWork>(rank_, type, std::move(future), std::move(inner), std::move(out));
}

WorkPtr JournaledBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  return submit({OpType::BROADCAST, {}, tensors, true, false,
                 [o](Backend& b, Tensors&, Tensors& out) { return b.broadcast(out, o); }, {}});
}

WorkPtr JournaledBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
  return submit({OpType::ALLREDUCE, {}, tensors, true, true,
                 [o](Backend& b, Tensors&, Tensors& out) { return b.allreduce(out, o); }, {}});
}

WorkPtr JournaledBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) {
  return submit({OpType::_ALLREDUCE_SPARSE, {}, tensors, true, true,
                 [o](Backend& b, Tensors&, Tensors& out) { return b.allreduce_sparse(out, o); }, {}});
}

WorkPtr JournaledBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
  return submit({OpType::ALLREDUCE_COALESCED, {}, tensors, true, true,
                 [o](Backend& b, Tensors&, Tensors& out) { return b.allreduce_coalesced(out, o); }, {}});
}

WorkPtr JournaledBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  return submit({OpType::REDUCE, {}, tensors, true, false,
                 [o](Backend& b, Tensors&, Tensors& out) { return b.reduce(out, o); }, {}});
}

WorkPtr JournaledBackend::allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) {
  auto sizes = sizes_of(out);
  return submit({OpType::ALLGATHER, in, flatten(out), false, true,
                 [o, sizes](Backend& b, Tensors& in, Tensors& out) {
                   auto nested = unflatten(out, sizes);
                   return b.allgather(nested, in, o);
                 },
                 [out, in] {
                   for (size_t i = 0; i < out.size(); i++)
                     for (auto& slot : out[i]) copy_raw(slot, in[i]);
                 }});
}

WorkPtr JournaledBackend::_allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) {
  return submit({OpType::_ALLGATHER_BASE, {in}, {out}, false, true,
                 [o](Backend& b, Tensors& in, Tensors& out) { return b._allgather_base(out[0], in[0], o); },
                 [out, in, size = size_] { echo_into_slots(out, in, size); }});
}

WorkPtr JournaledBackend::allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) {
  auto sizes = sizes_of(out);
  return submit({OpType::ALLGATHER_COALESCED, in, flatten(out), false, true,
                 [o, sizes](Backend& b, Tensors& in, Tensors& out) {
                   auto nested = unflatten(out, sizes);
                   return b.allgather_coalesced(nested, in, o);
                 },
                 [out, in] {
                   for (auto& slots : out)
                     for (size_t i = 0; i < slots.size(); i++) copy_raw(slots[i], in[i]);
                 }});
}

WorkPtr JournaledBackend::allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) {
  return submit({OpType::COALESCED, in, out, false, true,
                 [o](Backend& b, Tensors& in, Tensors& out) { return b.allgather_into_tensor_coalesced(out, in, o); },
                 [out, in, size = size_] {
                   for (size_t i = 0; i < out.size(); i++) echo_into_slots(out[i], in[i], size);
                 }});
}

WorkPtr JournaledBackend::gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) {
  auto sizes = sizes_of(out);
  return submit({OpType::GATHER, in, flatten(out), false, false,
                 [o, sizes](Backend& b, Tensors& in, Tensors& out) {
                   auto nested = unflatten(out, sizes);
                   return b.gather(nested, in, o);
                 },
                 [out, in] {
                   for (size_t i = 0; i < out.size(); i++)
                     for (auto& slot : out[i]) copy_raw(slot, in[i]);
                 }});
}

WorkPtr JournaledBackend::scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) {
  auto sizes = sizes_of(in);
  return submit({OpType::SCATTER, flatten(in), out, false, false,
                 [o, sizes](Backend& b, Tensors& in, Tensors& out) {
                   auto nested = unflatten(in, sizes);
                   return b.scatter(out, nested, o);
                 },
                 [out, in, rank = rank_] {
                   for (size_t i = 0; i < out.size(); i++) {
                     if (i < in.size()) copy_raw(out[i], in[i][static_cast<size_t>(rank)]);
                     else out[i].variable_data().zero_();
                   }
                 }});
}

WorkPtr JournaledBackend::reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) {
  auto sizes = sizes_of(in);
  return submit({OpType::REDUCE_SCATTER, flatten(in), out, false, true,
                 [o, sizes](Backend& b, Tensors& in, Tensors& out) {
                   auto nested = unflatten(in, sizes);
                   return b.reduce_scatter(out, nested, o);
                 },
                 [out, in, rank = rank_] {
                   for (size_t i = 0; i < out.size(); i++) copy_raw(out[i], in[i][static_cast<size_t>(rank)]);
                 }});
}

WorkPtr JournaledBackend::_reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) {
  return submit({OpType::_REDUCE_SCATTER_BASE, {in}, {out}, false, true,
                 [o](Backend& b, Tensors& in, Tensors& out) { return b._reduce_scatter_base(out[0], in[0], o); },
                 [out, in, rank = rank_, size = size_] {
                   copy_raw(out.view({-1}), in.reshape({size, -1}).select(0, rank));
                 }});
}

WorkPtr JournaledBackend::reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                          const c10d::ReduceScatterOptions& o) {
  return submit({OpType::REDUCE_SCATTER_TENSOR_COALESCED, in, out, false, true,
                 [o](Backend& b, Tensors& in, Tensors& out) { return b.reduce_scatter_tensor_coalesced(out, in, o); },
                 [out, in, rank = rank_, size = size_] {
                   for (size_t i = 0; i < out.size(); i++)
                     copy_raw(out[i].view({-1}), in[i].reshape({size, -1}).select(0, rank));
                 }});
}

WorkPtr JournaledBackend::alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits,
                                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) {
  return submit({OpType::ALLTOALL_BASE, {in}, {out}, false, true,
                 [o, out_splits, in_splits](Backend& b, Tensors& in, Tensors& out) {
                   auto os = out_splits, is = in_splits;
                   return b.alltoall_base(out[0], in[0], os, is, o);
                 },
                 [out] { out.variable_data().zero_(); }});
}

WorkPtr JournaledBackend::alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) {
  return submit({OpType::ALLTOALL, in, out, false, true,
                 [o](Backend& b, Tensors& in, Tensors& out) { return b.alltoall(out, in, o); },
                 [out] { for (auto& t : out) t.variable_data().zero_(); }});
}

WorkPtr JournaledBackend::send(Tensors& tensors, int to, int tag) {
  return submit({OpType::SEND, tensors, {}, false, false,
                 [to, tag](Backend& b, Tensors& in, Tensors&) { return b.send(in, to, tag); }, {}});
}

WorkPtr JournaledBackend::recv(Tensors& tensors, int from, int tag) {
  return submit({OpType::RECV, {}, tensors, false, false,
                 [from, tag](Backend& b, Tensors&, Tensors& out) { return b.recv(out, from, tag); },
                 [tensors] { for (auto& t : tensors) t.variable_data().zero_(); }});
}

WorkPtr JournaledBackend::recvAnysource(Tensors& tensors, int tag) {
  return submit({OpType::RECVANYSOURCE, {}, tensors, false, false,
                 [tag](Backend& b, Tensors&, Tensors& out) { return b.recvAnysource(out, tag); },
                 [tensors] { for (auto& t : tensors) t.variable_data().zero_(); }});
}

WorkPtr JournaledBackend::barrier(const c10d::BarrierOptions& o) {
  return submit({OpType::BARRIER, {}, {}, false, true,
                 [o](Backend& b, Tensors&, Tensors&) { return b.barrier(o); }, {}});
}

void JournaledBackend::monitoredBarrier(const c10d::BarrierOptions& o, bool) {
  // The monitored form exists to name a rank that is missing; here the control plane does that.
  barrier(o)->wait(kNoTimeout);
}

void JournaledBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (auto inner = group_->inner()) inner->setTimeout(timeout);
}

}  // namespace torchpass
