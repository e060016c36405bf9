// Which operations of one group this rank has issued, and the oldest that it still waits for: what the control plane asks
// for when training stands still. A collective is numbered within its step, so that its number is the same on all
// members, also on one that entered in the middle of the job.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <tuple>

namespace torchpass {

class Attendance {
 public:
  // (operation, step, number; -1 for a point-to-point one, seconds); the operation is "" where nothing is waited for.
  using Wait = std::tuple<std::string, int64_t, int64_t, double>;

  void issued(c10d::OpType type, int64_t step, const c10::intrusive_ptr<c10::ivalue::Future>& future) {
    const bool collective = !c10d::isP2POp(type);
    std::lock_guard<std::mutex> lock(m_);
    if (collective && step != step_) {
      step_ = step;
      number_ = 0;
    }
    forget_completed();
    pending_.push_back({type, step, collective ? number_++ : -1, std::chrono::steady_clock::now(),
                        c10::weak_intrusive_ptr<c10::ivalue::Future>(future)});
  }

  // The first collective that this rank has not joined: (step, number).
  std::pair<int64_t, int64_t> joined() {
    std::lock_guard<std::mutex> lock(m_);
    return {step_, number_};
  }

  Wait oldest() {
    std::lock_guard<std::mutex> lock(m_);
    forget_completed();
    const Pending* found = nullptr;
    for (auto& p : pending_) {
      if (!waits(p)) continue;
      if (!found) found = &p;
      if (p.number < 0) continue;
      found = &p;  // a collective tells more
      break;
    }
    if (!found) return {"", -1, -1, 0.0};
    const std::chrono::duration<double> age = std::chrono::steady_clock::now() - found->since;
    return {c10d::opTypeToString(found->type), found->step, found->number, age.count()};
  }

 private:
  struct Pending {
    c10d::OpType type;
    int64_t step, number;
    std::chrono::steady_clock::time_point since;
    c10::weak_intrusive_ptr<c10::ivalue::Future> future;  // weak: it would keep the results alive
  };
  static bool waits(const Pending& p) {
    auto future = p.future.lock();
    return future && !future->completed();
  }
  void forget_completed() {  // m_ is held
    while (!pending_.empty() && !waits(pending_.front())) pending_.pop_front();
  }

  std::mutex m_;
  std::deque<Pending> pending_;
  int64_t step_ = -2, number_ = 0;
};

}  // namespace torchpass
