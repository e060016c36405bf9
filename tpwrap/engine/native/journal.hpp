// The journal: what this rank has contributed to collectives since the last commit that all ranks share.
//
// Every collective becomes an Entry that keeps a copy of its inputs. While a group is live an entry is launched on the
// group's inner backend at once. When an inner operation fails, or the control plane orders it, the journal is
// *suspended*: nothing is launched any more, callers stay blocked in their (incomplete) futures, new operations queue
// up. After the communicators are rebuilt, replay() runs the entries again on the new ones: finished ones into scratch
// (a newcomer that executes the step from its start needs our contributions), unfinished ones into the caller's
// buffers, whose futures then complete. User code sees one slow call.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace torchpass {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
// Launches one operation on an inner backend. In-place operations read and write `out`; the others read `in`.
using Launch = std::function<WorkPtr(c10d::Backend&, Tensors& in, Tensors& out)>;

// What the injector may do when a chosen collective is issued (tpwrap/engine/injector.py).
enum class Fault : int { none = 0, kill, kill_node, stop, exit, exception, drop };

struct Call {  // one operation as the caller issued it
  c10d::OpType type;
  Tensors in, out;
  bool in_place;
  bool synchronizes;  // its completion here proves that every member has issued it
  Launch launch;
  std::function<void()> echo;  // the result a lone rank would give itself (offline and poisoned)
};

struct Entry {
  Call call;
  int64_t step = 0;
  uint64_t index = 0;       // position among the group's operations, from 0
  uint64_t epoch = 0;       // which inner backend it was last launched on
  bool launched = false, done = false, scratch = false, dropped = false;
  bool region = false;      // issued in a part of the script that can be run once more (Journal::set_region)
  bool replayable = true;   // false: the byte budget did not allow a copy of its inputs
  std::vector<std::pair<std::vector<int64_t>, at::TensorOptions>> shapes;  // of `out`, once done
  int64_t bytes = 0;
  FuturePtr future;
  WorkPtr inner_work;
};
using EntryPtr = std::shared_ptr<Entry>;

class Journal;

// One process group's part of the journal.
class Group : public std::enable_shared_from_this<Group> {
 public:
  Group(std::shared_ptr<Journal> journal, std::string name, int rank, int size, bool poll);

  FuturePtr submit(Call call, WorkPtr* inner);
  void adopt(BackendPtr inner);  // install a new inner backend; in held mode nothing is launched before replay()
  BackendPtr inner();
  int64_t in_flight();           // operations of the current inner backend that have not ended
  // Serve the outputs of set-up collectives from a record (a newcomer that runs the script's set-up again).
  // first: small outputs of the operations of the first step, which come after those of the set-up.
  void serve(std::vector<Tensors> record, std::vector<Tensors> first);
  std::vector<Tensors> record();
  std::vector<Tensors> first();  // empty where nothing was received from one peer: then nobody needs it
  uint64_t served_mismatches() const { return mismatches_; }
  int64_t step() const;

  const std::string name;
  const int rank, size;

 private:
  friend class Journal;
  FuturePtr offline(Call& call);
  void pump(const Entry* caller = nullptr);  // launch queued entries, in order, while the journal allows it
  void launch(const EntryPtr& entry, const BackendPtr& inner, bool direct);
  void complete(const EntryPtr& entry, uint64_t epoch, const std::string* error);
  void ended(uint64_t epoch);                // Journal::m_ is held
  void replay(int64_t from_step);  // launching_ is held
  void poison();                   // launching_ is held
  std::vector<Tensors> records(bool first);

  const std::shared_ptr<Journal> owner_;  // callbacks of inner operations may outlive every other reference
  Journal& journal_;
  const bool poll_;
  // Held while entries are handed to the inner backend: keeps their order. Recursive, because an inner future that is
  // complete already runs its callbacks inside launch(), and those may issue the next collective.
  std::recursive_mutex launching_;
  std::deque<EntryPtr> log_;        // guarded by Journal::m_
  BackendPtr inner_;
  uint64_t epoch_ = 0, issued_ = 0, served_ = 0;
  int64_t in_flight_ = 0;           // on inner_ alone: what an earlier one has left behind does not count
  std::atomic<uint64_t> mismatches_{0};
  std::map<uint64_t, Tensors> recorded_;
  uint64_t in_setup_ = 0;           // operations issued before the first step
  bool received_ = false;           // something from one peer, in the first step
  std::vector<Tensors> to_serve_;
  uint64_t must_fit_ = 0;           // of to_serve_: those of the set-up
};

class Journal : public std::enable_shared_from_this<Journal> {
 public:
  enum class Mode : int { offline, held, live };

  explicit Journal(int world_size, int64_t budget_bytes, int64_t record_bytes);
  ~Journal();

  std::shared_ptr<Group> group(const std::string& name, int rank, int size, bool poll);

  void set_step(int64_t step);
  int64_t step() const { return step_; }
  void suspend();                                   // stop launching, everywhere
  bool drain(double seconds);                       // wait until no inner operation is in flight
  void go_offline();
  void go_live();                                   // newcomer: from here on operations are real
  void replay(int64_t from_step);                   // survivor: see above; ends in live mode
  bool wait_replayed(double seconds);
  void set_budget(int64_t bytes);                   // 0: keep nothing from now on
  bool replayable(int64_t from_step);               // false: the budget was exceeded in a step >= from_step
  bool redoable(int64_t from_step);                 // false: it was outside of regions, which alone can be run again
  void set_region(bool on);                         // the script is in a part that can be run once more
  bool settled(double seconds);                     // wait until no operation is unfinished; false: held, or too long
  void all_have(int64_t step);                      // every rank has reached it; no newcomer enters before it
  // Redo: what regions have issued since the last commit completes at once with echoes, as does whatever comes until
  // replay(); what was issued outside of them stays, and is replayed then.
  void poison();
  std::string wait_failure(double seconds);         // "" on timeout, else why the journal was suspended by itself
  void hold(bool on);                               // durability: nothing is launched while on (see buddies.hpp)
  void close();                                     // wakes wait_failure for good

  void arm(int64_t step, int64_t nth, Fault fault); // injector
  std::map<std::string, int64_t> stats();

 private:
  friend class Group;
  using Groups = std::vector<std::shared_ptr<Group>>;
  using Orders = std::vector<std::unique_lock<std::recursive_mutex>>;
  Groups alive();                                   // those that the script still holds
  std::pair<Groups, Orders> stopped();
  bool may_launch() const { return mode_ == Mode::live && !held_; }
  void trim(int64_t step);
  void forget_region();                             // its copies are of no use: one of them did not fit
  Tensor keep(const Tensor& t);                     // copy into pooled memory
  void recycle(Entry& entry);
  Fault next_fault();
  void monitor_loop();
  void watch(std::shared_ptr<Group> group, EntryPtr entry, WorkPtr work, uint64_t epoch);

  std::mutex m_;
  std::condition_variable progress_;  // somebody drains, or waits for a replay
  std::condition_variable failed_;    // apart: a thread always waits here, and every operation would wake it
  Mode mode_ = Mode::held;
  bool held_ = false, closed_ = false;
  std::string failure_;
  const int world_size_;
  int64_t budget_;
  const int64_t record_budget_;
  std::atomic<int64_t> step_{-1};
  int64_t bytes_ = 0, peak_ = 0, recorded_ = 0, in_flight_ = 0, replaying_ = 0, replayed_ = 0,
          replay_from_ = -1, lost_step_ = -2, common_ = -1;  // common_: a step that every rank has reached
  int64_t lost_outside_ = -2, region_step_ = -2;    // region_step_: newest step in which a region has issued something
  bool region_ = false, too_large_ = false;         // too_large_: a step's log did not fit, so no further one is kept
  int64_t issued_in_step_ = 0, issued_ = 0, bad_ = 0, armed_step_ = -3, armed_nth_ = -1;
  Fault armed_ = Fault::none;
  std::vector<std::weak_ptr<Group>> groups_;
  // Free copies, by bytes and device.
  std::map<std::tuple<int64_t, c10::DeviceType, c10::DeviceIndex>, std::vector<Tensor>> pool_;
  int64_t pooled_ = 0;

  struct Watched { std::shared_ptr<Group> group; EntryPtr entry; WorkPtr work; uint64_t epoch; };
  std::list<Watched> watched_;
  std::condition_variable watch_cv_;
  std::unique_ptr<std::thread> monitor_;
};

inline int64_t Group::step() const { return journal_.step(); }

}  // namespace torchpass
