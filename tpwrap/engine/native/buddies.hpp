// Makes a rank's small state durable at its buddies before the rank contributes to the step (the durability rule).
//
// publish() writes one frame to every buddy and holds the journal: no collective is launched until each live buddy has
// acknowledged. The acknowledgements are read by C++ threads, because a Python thread would have to win the GIL from
// the training loop first.
#pragma once
#include "journal.hpp"

namespace torchpass {

class Buddies {
 public:
  explicit Buddies(std::shared_ptr<Journal> journal) : journal_(std::move(journal)) {}
  ~Buddies();
  void add(int fd);                     // takes ownership; the peer answers each frame with its 8-byte sequence number
  void clear();                         // forget all of them (and release the hold)
  // Send `frame` to all; returns the number of live buddies. The journal is held until each of them acknowledges `seq`.
  int publish(uint64_t seq, const std::string& frame);
  bool wait(double seconds);            // until nothing is outstanding

 private:
  struct Buddy { int fd; uint64_t acked = 0; bool live = true; std::thread reader; };
  void read_acks(std::shared_ptr<Buddy> buddy);
  void settle();                        // hold or release the journal
  std::shared_ptr<Journal> journal_;
  std::mutex m_, settling_;
  std::condition_variable cv_;
  std::vector<std::shared_ptr<Buddy>> buddies_;
  uint64_t wanted_ = 0;
};

}  // namespace torchpass
