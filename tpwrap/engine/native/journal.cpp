#include "journal.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <thread>

namespace torchpass {
namespace {

FuturePtr new_future() { return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors()); }

// Shares storage with `t` but neither autograd history nor version counter: writing through it must not look like an
// in-place modification to autograd, as gloo's own writes do not.
Tensor raw(const Tensor& t) { return t.variable_data(); }

// Below this many bytes one thread copies as fast as several, and the dispatcher would cost more than the copy.
constexpr int64_t kSmall = 1 << 17;

// Up to so many bytes of an operation's result are recorded in the first step: what the stages of a pipeline tell each
// other about their shapes.
constexpr int64_t kRecordedOfFirst = 1 << 12;

// Whether all of it is one plain piece of memory, so that bytes can stand for it.
bool plain(const Tensor& t) {
  return t.layout() == at::kStrided && t.has_storage() && t.is_contiguous() && !t.is_conj() && !t.is_neg() &&
         !t.is_quantized();
}

void overwrite(Tensors& out, const Tensors& in) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < out.size(); i++) raw(out[i]).copy_(in[i]);
}

}  // namespace

// ---------------------------------------------------------------------------------------------- Group

Group::Group(std::shared_ptr<Journal> journal, std::string name_, int rank_, int size_, bool poll)
    : name(std::move(name_)), rank(rank_), size(size_), owner_(std::move(journal)), journal_(*owner_), poll_(poll) {}

BackendPtr Group::inner() {
  std::lock_guard<std::mutex> lock(journal_.m_);
  return inner_;
}

int64_t Group::in_flight() {
  std::lock_guard<std::mutex> lock(journal_.m_);
  return in_flight_;
}

void Group::adopt(BackendPtr inner) {
  BackendPtr old;  // destroyed after the lock is gone: ~ProcessGroupGloo joins threads whose callbacks take it
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    old = std::move(inner_);
    inner_ = std::move(inner);
    epoch_++;
    journal_.in_flight_ -= std::exchange(in_flight_, 0);
    if (journal_.in_flight_ == 0) journal_.progress_.notify_all();
    if (!inner_ || journal_.mode_ != Journal::Mode::live) return;
  }
  // The journal is live already: a group just created, or one that the newcomer's script created later than its entry.
  std::lock_guard<std::recursive_mutex> order(launching_);
  replay(journal_.replay_from_);
}

void Group::serve(std::vector<Tensors> record, std::vector<Tensors> first) {
  std::lock_guard<std::mutex> lock(journal_.m_);
  must_fit_ = record.size();
  to_serve_ = std::move(record);
  to_serve_.insert(to_serve_.end(), first.begin(), first.end());
  served_ = 0;
}

std::vector<Tensors> Group::records(bool first) {  // Journal::m_ is held
  std::vector<Tensors> out;
  const uint64_t begin = first ? in_setup_ : 0;
  for (auto& [index, tensors] : recorded_) {
    if ((index >= in_setup_) != first) continue;
    if (out.size() <= index - begin) out.resize(index - begin + 1);
    out[index - begin] = tensors;
  }
  if (!first) out.resize(in_setup_);
  return out;
}

std::vector<Tensors> Group::record() {
  std::lock_guard<std::mutex> lock(journal_.m_);
  return records(false);
}

std::vector<Tensors> Group::first() {
  std::lock_guard<std::mutex> lock(journal_.m_);
  return received_ ? records(true) : std::vector<Tensors>();
}

FuturePtr Group::offline(Call& call) {
  Tensors record;
  bool serving = false, must_fit = false;
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    serving = served_ < to_serve_.size();
    must_fit = served_ < must_fit_;
    if (serving) record = to_serve_[served_++];
  }
  at::NoGradGuard no_grad;
  bool fits = record.size() == call.out.size();
  for (size_t i = 0; fits && i < record.size(); i++) fits = record[i].sizes() == call.out[i].sizes();
  if (serving && !record.empty() && fits) {
    for (size_t i = 0; i < record.size(); i++) raw(call.out[i]).copy_(record[i]);
  } else {
    if (serving && must_fit && !record.empty()) mismatches_++;
    if (call.echo) call.echo();
  }
  auto future = new_future();
  future->markCompleted(c10::IValue(call.out));
  return future;
}

FuturePtr Group::submit(Call call, WorkPtr* inner_work) {
  auto entry = std::make_shared<Entry>();
  Fault fault = Fault::none;
  {
    std::unique_lock<std::mutex> lock(journal_.m_);
    if (journal_.mode_ == Journal::Mode::offline) {
      lock.unlock();
      return offline(call);
    }
    entry->step = journal_.step_;
    fault = journal_.next_fault();
  }
  switch (fault) {
    case Fault::kill: ::kill(::getpid(), SIGKILL); break;
    case Fault::kill_node: ::kill(0, SIGKILL); break;
    case Fault::stop: ::kill(::getpid(), SIGSTOP); break;
    case Fault::exit: ::_exit(3); break;
    case Fault::exception: throw std::runtime_error("torchpass: injected exception");
    default: break;
  }
  entry->dropped = fault == Fault::drop;
  entry->future = new_future();
  const Tensors& source = call.in_place ? call.out : call.in;
  int64_t bytes = 0;
  for (auto& t : source) bytes += static_cast<int64_t>(t.nbytes());
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    entry->region = journal_.region_;
    if (entry->region) journal_.region_step_ = entry->step;
    // Between two regions of one step: run again, they would come before and after it, but its replay would not.
    else if (journal_.region_step_ == entry->step)
      journal_.lost_outside_ = std::max(journal_.lost_outside_, entry->step);
    const bool fits = journal_.bytes_ + bytes <= journal_.budget_;
    entry->replayable = fits && !(entry->region && journal_.too_large_);
    if (entry->replayable) {
      entry->bytes = bytes;
      journal_.bytes_ += bytes;
      journal_.peak_ = std::max(journal_.peak_, journal_.bytes_);
    } else {
      journal_.lost_step_ = std::max(journal_.lost_step_, entry->step);
      if (!entry->region) journal_.lost_outside_ = std::max(journal_.lost_outside_, entry->step);
      else if (!std::exchange(journal_.too_large_, true)) journal_.forget_region();
    }
  }
  if (entry->replayable) {
    Tensors kept;
    kept.reserve(source.size());
    for (auto& t : source) kept.push_back(journal_.keep(t));
    call.in = std::move(kept);
  }
  entry->call = std::move(call);
  if (!entry->region) entry->call.echo = nullptr;  // never poisoned; it holds the caller's tensors
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    entry->index = issued_++;
    if (entry->step < 0) in_setup_ = issued_;
    journal_.issued_++;
    log_.push_back(entry);
  }
  auto future = entry->future;
  pump(entry.get());
  if (inner_work) {
    std::lock_guard<std::mutex> lock(journal_.m_);
    *inner_work = entry->inner_work;
  }
  return future;
}

void Group::pump(const Entry* caller) {
  std::lock_guard<std::recursive_mutex> order(launching_);
  while (true) {
    EntryPtr next;
    BackendPtr inner;
    {
      std::lock_guard<std::mutex> lock(journal_.m_);
      if (!journal_.may_launch() || !inner_) return;
      // Searched from the back: all but the newest few are launched.
      for (auto it = log_.rbegin(); it != log_.rend() && !(*it)->launched; ++it) next = *it;
      if (!next) return;
      inner = inner_;
    }
    launch(next, inner, next.get() == caller);
  }
}

void Group::launch(const EntryPtr& entry, const BackendPtr& inner, bool direct) {
  uint64_t epoch;
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    epoch = entry->epoch = epoch_;
    entry->launched = true;
    in_flight_++;
    journal_.in_flight_++;
  }
  WorkPtr work;
  try {
    at::NoGradGuard no_grad;
    work = entry->call.launch(*inner, entry->call.in, entry->call.out);
  } catch (const std::exception& e) {
    const std::string what = e.what();
    const auto type = entry->call.type;
    const bool p2p = c10d::isP2POp(type);
    // gloo and NCCL report communication errors later, through the work; what a collective throws at once is a wrong
    // argument, the caller's bug. Point-to-point operations of gloo are issued on the socket at once.
    if (direct && !p2p && !entry->scratch) {
      {
        std::lock_guard<std::mutex> lock(journal_.m_);
        ended(epoch);
        journal_.bytes_ -= entry->bytes;
        for (auto it = log_.begin(); it != log_.end(); ++it)
          if (*it == entry) { log_.erase(it); break; }
      }
      throw;
    }
    complete(entry, epoch, &what);
    return;
  }
  FuturePtr inner_future;
  if (!poll_) {
    try { inner_future = work->getFuture(); } catch (const std::exception&) {}  // gloo's reduce_scatter has none
  }
  {
    WorkPtr old = work;  // let go after the lock, as in complete(): of a launch that was left behind
    std::lock_guard<std::mutex> lock(journal_.m_);
    entry->inner_work.swap(old);
  }
  auto self = shared_from_this();
  if (inner_future) {
    inner_future->addCallback([self, entry, epoch](c10::ivalue::Future& f) {
      if (f.hasError()) {
        const std::string why = f.tryRetrieveErrorMessage();
        self->complete(entry, epoch, &why);
      } else {
        self->complete(entry, epoch, nullptr);
      }
    });
  } else if (poll_) {
    journal_.watch(self, entry, work, epoch);
  } else {
    // gloo's send and recv make progress only while somebody waits for them.
    std::thread([self, entry, work, epoch] {
      std::string error;
      try {
        if (!work->wait()) error = "operation aborted";
      } catch (const std::exception& e) {
        error = *e.what() ? e.what() : "communication error";
      }
      self->complete(entry, epoch, error.empty() ? nullptr : &error);
    }).detach();
  }
}

void Group::complete(const EntryPtr& entry, uint64_t epoch, const std::string* error) {
  static const std::string dropped = "injected: result dropped";
  FuturePtr future;
  Tensors out;
  // Let go after the lock: they may hold the last reference to a tensor that Python knows.
  WorkPtr finished;
  std::function<void()> echo;
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    ended(epoch);
    if (epoch != epoch_ || entry->epoch != epoch || entry->done) return;  // an abandoned launch
    finished = std::move(entry->inner_work);
    if (entry->dropped && !error) { entry->dropped = false; error = &dropped; }
    if (error) {
      journal_.bad_++;
      if (journal_.mode_ == Journal::Mode::live) {
        journal_.mode_ = Journal::Mode::held;
        journal_.failure_ = error->empty() ? "unknown communication error" : *error;
        journal_.failed_.notify_all();
        journal_.progress_.notify_all();
      }
      return;
    }
    entry->done = true;
    echo.swap(entry->call.echo);
    if (entry->scratch) {
      if (--journal_.replaying_ == 0) journal_.progress_.notify_all();
      return;
    }
    if (entry->step <= 0) {
      int64_t bytes = 0;
      for (auto& t : entry->call.out) bytes += static_cast<int64_t>(t.nbytes());
      const bool wanted = entry->step < 0 || bytes <= kRecordedOfFirst;
      if (wanted && journal_.recorded_ + bytes <= journal_.record_budget_) {
        at::NoGradGuard no_grad;
        Tensors copy;
        for (auto& t : entry->call.out) copy.push_back(t.detach().clone());
        journal_.recorded_ += bytes;
        recorded_[entry->index] = std::move(copy);
        if (entry->step == 0 && entry->call.type == c10d::OpType::RECV) received_ = true;
      } else {
        recorded_[entry->index] = {};  // an empty record: the newcomer echoes, its state comes from a replica
      }
    }
    if (!entry->call.in_place)
      for (auto& t : entry->call.out) entry->shapes.emplace_back(t.sizes().vec(), t.options());
    out = std::move(entry->call.out);
    entry->call.out.clear();
    future = std::move(entry->future);
    if (entry->call.synchronizes && size == journal_.world_size_) journal_.trim(entry->step);
    while (!log_.empty() && log_.front()->done && !log_.front()->replayable) log_.pop_front();
  }
  future->markCompleted(c10::IValue(out));
}

void Group::ended(uint64_t epoch) {
  if (epoch != epoch_) return;  // adopt() has written it off
  in_flight_--;
  if (--journal_.in_flight_ == 0) journal_.progress_.notify_all();
}

void Group::replay(int64_t from_step) {
  std::vector<EntryPtr> todo;
  BackendPtr inner;
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    inner = inner_;
    if (!inner) return;  // created after the newcomer's point of entry: rebuilt later, adopt() then launches its queue
    for (auto& e : log_) {
      if (e->done && e->step >= from_step) {
        auto again = std::make_shared<Entry>();
        again->call = e->call;
        again->step = e->step;
        again->scratch = true;
        again->shapes = e->shapes;
        journal_.replaying_++;
        todo.push_back(again);
      } else if (!e->done) {
        e->launched = true;  // ours to launch, in order; pump() must not
        todo.push_back(e);
      }
    }
    journal_.replayed_ += static_cast<int64_t>(todo.size());
  }
  for (auto& e : todo) {
    at::NoGradGuard no_grad;
    if (e->scratch) {
      if (e->call.in_place)
        for (auto& t : e->call.in) e->call.out.push_back(t.clone());
      for (auto& [sizes, options] : e->shapes) e->call.out.push_back(at::empty(sizes, options));
    } else if (e->call.in_place && e->replayable) {
      overwrite(e->call.out, e->call.in);  // the failed attempt may have left partial sums in the caller's buffer
    }
    launch(e, inner, false);
  }
}

void Group::poison() {
  std::vector<EntryPtr> unfinished;
  {
    std::lock_guard<std::mutex> lock(journal_.m_);
    std::deque<EntryPtr> kept;
    for (auto& e : log_) {
      if (!e->region || e->step < journal_.step_) {
        kept.push_back(e);
      } else {
        journal_.recycle(*e);
        if (!e->done) unfinished.push_back(e);
      }
    }
    log_.swap(kept);
    for (auto& e : unfinished) e->done = true;
  }
  at::NoGradGuard no_grad;
  for (auto& e : unfinished) {
    // A broadcast of objects tells sizes first, and the buffer for them is not initialised: no rank may take what lies in
    // it for a size.
    if (e->call.type == c10d::OpType::BROADCAST)
      for (auto& t : e->call.out)
        if (t.scalar_type() == at::kLong) raw(t).zero_();
    if (e->call.echo) e->call.echo();
    e->future->markCompleted(c10::IValue(e->call.out));
    e->future.reset();
  }
}

// -------------------------------------------------------------------------------------------- Journal

Journal::Journal(int world_size, int64_t budget_bytes, int64_t record_bytes)
    : world_size_(world_size), budget_(budget_bytes), record_budget_(record_bytes) {}

Journal::~Journal() {
  close();
  if (!monitor_) return;
  if (monitor_->get_id() == std::this_thread::get_id()) monitor_->detach();  // it held the last reference
  else monitor_->join();
}

std::shared_ptr<Group> Journal::group(const std::string& name, int rank, int size, bool poll) {
  auto g = std::make_shared<Group>(shared_from_this(), name, rank, size, poll);
  std::lock_guard<std::mutex> lock(m_);
  groups_.push_back(g);
  return g;
}

void Journal::set_step(int64_t step) {
  std::lock_guard<std::mutex> lock(m_);
  step_ = step;
  issued_in_step_ = 0;
}

void Journal::suspend() {
  std::lock_guard<std::mutex> lock(m_);
  if (mode_ == Mode::live) mode_ = Mode::held;
  progress_.notify_all();
}

bool Journal::drain(double seconds) {
  std::unique_lock<std::mutex> lock(m_);
  return progress_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return in_flight_ == 0; });
}

void Journal::go_offline() {
  std::lock_guard<std::mutex> lock(m_);
  mode_ = Mode::offline;
}

void Journal::go_live() {
  Groups groups;
  {
    std::lock_guard<std::mutex> lock(m_);
    mode_ = Mode::live;
    failure_.clear();
    groups = alive();
  }
  for (auto& g : groups) g->pump();
}

Journal::Groups Journal::alive() {  // m_ is held
  Groups groups;
  for (auto& w : groups_) if (auto g = w.lock()) groups.push_back(g);
  return groups;
}

// All groups, and a lock on the order of each: nothing is launched as long as they are held. (Only the recovery thread
// ever holds more than one `launching_`, in replay() or poison(), so the order among them cannot deadlock.)
std::pair<Journal::Groups, Journal::Orders> Journal::stopped() {
  Groups groups;
  {
    std::lock_guard<std::mutex> lock(m_);
    groups = alive();
  }
  Orders orders;
  for (auto& g : groups) orders.emplace_back(g->launching_);
  return {std::move(groups), std::move(orders)};
}

void Journal::replay(int64_t from_step) {
  // Before the journal goes live: what callers issue meanwhile queues behind the replay.
  auto [groups, orders] = stopped();
  {
    std::lock_guard<std::mutex> lock(m_);
    failure_.clear();
    replaying_ = replayed_ = 0;
    replay_from_ = from_step;
    mode_ = Mode::live;
  }
  for (auto& g : groups) g->replay(from_step);
  for (auto& g : groups) g->pump();
}

bool Journal::wait_replayed(double seconds) {
  std::unique_lock<std::mutex> lock(m_);
  return progress_.wait_for(lock, std::chrono::duration<double>(seconds),
                            [&] { return replaying_ == 0 || mode_ != Mode::live; });
}

void Journal::set_budget(int64_t bytes) {
  std::lock_guard<std::mutex> lock(m_);
  budget_ = bytes;
}

bool Journal::replayable(int64_t from_step) {
  std::lock_guard<std::mutex> lock(m_);
  return lost_step_ < from_step;
}

bool Journal::redoable(int64_t from_step) {
  std::lock_guard<std::mutex> lock(m_);
  return lost_outside_ < from_step;
}

void Journal::set_region(bool on) {
  std::lock_guard<std::mutex> lock(m_);
  region_ = on;
}

bool Journal::settled(double seconds) {
  std::unique_lock<std::mutex> lock(m_);
  bool all = false;
  progress_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    all = true;
    for (auto& g : alive())
      for (auto& e : g->log_) all = all && e->done;
    return all || mode_ != Mode::live;
  });
  return all && mode_ == Mode::live;
}

void Journal::all_have(int64_t step) {
  std::lock_guard<std::mutex> lock(m_);
  trim(step);
}

void Journal::forget_region() {  // m_ is held
  for (auto& g : alive()) {
    std::deque<EntryPtr> kept;
    for (auto& e : g->log_) {
      const bool useless = e->region && e->step == step_;
      if (!useless || !e->done) kept.push_back(e);
      if (!useless) continue;
      if (e->done) recycle(*e);
      else bytes_ -= std::exchange(e->bytes, 0);
      e->replayable = false;
    }
    g->log_.swap(kept);
  }
}

void Journal::poison() {
  // Nothing is issued between the change of mode and the end of what was issued before.
  auto [groups, orders] = stopped();
  {
    std::lock_guard<std::mutex> lock(m_);
    mode_ = Mode::offline;
    lost_step_ = std::max<int64_t>(lost_step_, step_);  // what regions have contributed so far is no longer there
    for (auto& g : groups) g->to_serve_.clear();
  }
  for (auto& g : groups) g->poison();
}

std::string Journal::wait_failure(double seconds) {
  std::unique_lock<std::mutex> lock(m_);
  failed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return closed_ || !failure_.empty(); });
  return std::exchange(failure_, std::string());
}

void Journal::hold(bool on) {
  Groups groups;
  {
    std::lock_guard<std::mutex> lock(m_);
    if (held_ == on) return;
    held_ = on;
    if (!on) groups = alive();
  }
  for (auto& g : groups) g->pump();
}

void Journal::close() {
  std::lock_guard<std::mutex> lock(m_);
  closed_ = true;
  failed_.notify_all();
  watch_cv_.notify_all();
}

void Journal::arm(int64_t step, int64_t nth, Fault fault) {
  std::lock_guard<std::mutex> lock(m_);
  armed_step_ = step;
  armed_nth_ = nth;
  armed_ = fault;
}

Fault Journal::next_fault() {  // m_ is held
  const int64_t nth = issued_in_step_++;
  if (armed_ == Fault::none || step_ != armed_step_ || nth != armed_nth_) return Fault::none;
  return std::exchange(armed_, Fault::none);
}

// All ranks have reached `step`: no newcomer can enter before it, so older contributions are never asked for again.
void Journal::trim(int64_t step) {  // m_ is held
  if (step <= common_) return;  // done: at the first collective of that step
  common_ = step;
  for (auto& g : alive()) {
    while (!g->log_.empty() && g->log_.front()->done && g->log_.front()->step < step) {
      recycle(*g->log_.front());
      g->log_.pop_front();
    }
  }
}

// Copies come from a pool: a step's worth of fresh malloc would page-fault through the same megabytes every step. Training
// repeats itself, so what comes out has, as a rule, the right shape already.
Tensor Journal::keep(const Tensor& t) {
  if (!plain(t)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;  // no view tracking: a view would keep its base alive
    return t.detach().clone();
  }
  const auto bytes = static_cast<int64_t>(t.nbytes());
  Tensor copy;
  {
    std::lock_guard<std::mutex> lock(m_);
    auto it = pool_.find({bytes, t.device().type(), t.device().index()});
    if (it != pool_.end() && !it->second.empty()) {
      copy = std::move(it->second.back());
      it->second.pop_back();
      pooled_ -= bytes;
    }
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!copy.defined()) {
    copy = at::empty(t.sizes(), t.options());
  } else if (copy.scalar_type() != t.scalar_type() || copy.sizes() != t.sizes()) {
    copy = copy.view({-1}).view(t.scalar_type()).view(t.sizes());
  }
  if (bytes <= kSmall && t.is_cpu()) std::memcpy(copy.mutable_data_ptr(), t.const_data_ptr(), t.nbytes());
  else copy.copy_(t);
  return copy;
}

void Journal::recycle(Entry& entry) {  // m_ is held
  bytes_ -= entry.bytes;
  if (!entry.replayable) return;
  for (auto& t : entry.call.in) {
    const auto bytes = static_cast<int64_t>(t.nbytes());
    if (bytes == 0 || pooled_ + bytes > budget_ || !plain(t) || t.storage_offset() != 0 ||
        static_cast<int64_t>(t.storage().nbytes()) != bytes)
      continue;
    if (t.use_count() > 1 || t.storage().use_count() > 1) continue;  // an inner operation still reads it
    pool_[{bytes, t.device().type(), t.device().index()}].push_back(std::move(t));
    pooled_ += bytes;
  }
}

// Works of device backends are polled by one thread: their futures complete at launch, not when the device is done, and
// a host that runs ahead of a broken collective would launch the optimizer on garbage.
void Journal::watch(std::shared_ptr<Group> group, EntryPtr entry, WorkPtr work, uint64_t epoch) {
  std::lock_guard<std::mutex> lock(m_);
  watched_.push_back({std::move(group), std::move(entry), std::move(work), epoch});
  if (!monitor_) monitor_ = std::make_unique<std::thread>([self = shared_from_this()] { self->monitor_loop(); });
  watch_cv_.notify_all();
}

void Journal::monitor_loop() {
  std::unique_lock<std::mutex> lock(m_);
  while (!closed_) {
    if (watched_.empty()) {
      watch_cv_.wait(lock, [&] { return closed_ || !watched_.empty(); });
      continue;
    }
    std::list<Watched> finished, left_behind;
    for (auto it = watched_.begin(); it != watched_.end();) {
      auto next = std::next(it);
      if (it->epoch != it->group->epoch_) {  // its backend was replaced: it may never end, and nobody waits for it
        left_behind.splice(left_behind.end(), watched_, it);
        it = next;
        continue;
      }
      bool over = true;
      lock.unlock();
      try { over = it->work->isCompleted(); } catch (const std::exception&) {}
      lock.lock();
      if (over) finished.splice(finished.end(), watched_, it);
      it = next;
    }
    const bool progress = !finished.empty();
    lock.unlock();
    for (auto& w : finished) {
      std::string error;
      try {
        if (!w.work->wait()) error = "operation aborted";
      } catch (const std::exception& e) { error = e.what(); if (error.empty()) error = "communication error"; }
      w.group->complete(w.entry, w.epoch, error.empty() ? nullptr : &error);
    }
    finished.clear();
    left_behind.clear();
    lock.lock();
    if (!progress && !watched_.empty()) watch_cv_.wait_for(lock, std::chrono::microseconds(100));
  }
}

std::map<std::string, int64_t> Journal::stats() {
  std::lock_guard<std::mutex> lock(m_);
  int64_t entries = 0;
  for (auto& g : alive()) entries += static_cast<int64_t>(g->log_.size());
  return {{"mode", static_cast<int64_t>(mode_)}, {"step", step_}, {"bytes", bytes_}, {"peak_bytes", peak_},
          {"entries", entries}, {"issued", issued_}, {"bad", bad_}, {"in_flight", in_flight_},
          {"replayed", replayed_}, {"recorded_bytes", recorded_}, {"held", held_}, {"common_step", common_}, {"lost_step", lost_step_}, {"too_large", too_large_}, {"issued_in_step", issued_in_step_}};
}

}  // namespace torchpass
