// The c10d backend that lives inside every process group for as long as the worker does.
//
// The ProcessGroup object, its name and its ranks never change; what changes with each generation is the inner backend
// (gloo, NCCL) that the journal's Group hands operations to. Python cannot subclass c10d::Backend, and an exception or a
// missing method here would reach DDP's reducer, hence C++ and hence complete.
#pragma once
#include "attendance.hpp"
#include "journal.hpp"

namespace torchpass {

class JournaledWork : public c10d::Work {
 public:
  JournaledWork(int rank, c10d::OpType type, FuturePtr future, WorkPtr inner, Tensors out)
      : Work(rank, type), future_(std::move(future)), inner_(std::move(inner)), out_(std::move(out)) {}
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  std::exception_ptr exception() const override { return future_->hasError() ? future_->exception_ptr() : nullptr; }
  std::vector<Tensor> result() override { return out_; }
  int sourceRank() const override { return inner_ ? inner_->sourceRank() : -1; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout) override;
  FuturePtr getFuture() override { return future_; }
  void abort() override {}

 private:
  FuturePtr future_;
  WorkPtr inner_;
  Tensors out_;
};

class JournaledBackend : public c10d::Backend {
 public:
  JournaledBackend(std::shared_ptr<Group> group, std::string backend_name)
      : Backend(group->rank, group->size), group_(std::move(group)), backend_name_(std::move(backend_name)) {}
  const std::string getBackendName() const override { return backend_name_; }
  std::shared_ptr<Group> group() { return group_; }
  Attendance& attendance() { return attendance_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& o) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override;
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override;
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override;
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override;
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override;
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& o) override;
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override;
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions& o) override;
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& o) override;
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all) override;

  void setSequenceNumberForGroup() override {}  // gloo's is only a debugging aid, and a new generation restarts it
  uint64_t getSequenceNumberForGroup() override { return 0; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }  // a failure is healed, never reported here
  void setTimeout(std::chrono::milliseconds timeout) override;
  void enableCollectivesTiming() override {}
  void abort() override {}     // aborting and tearing down belong to the control plane: user code that destroys its
  void shutdown() override {}  // groups at the end must not take them from a peer that still recovers

 private:
  WorkPtr submit(Call call);
  std::shared_ptr<Group> group_;
  const std::string backend_name_;
  Attendance attendance_;
};

}  // namespace torchpass
