// Python bindings: tpwrap.engine._native
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include "backend.hpp"
#include "buddies.hpp"
#include "digest.hpp"

namespace py = pybind11;
using namespace torchpass;
// For everything that takes a lock: a thread that holds the lock may need the GIL to drop a tensor that Python knows.
using NoGil = py::call_guard<py::gil_scoped_release>;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");

  py::enum_<Fault>(m, "Fault")
      .value("NONE", Fault::none).value("KILL", Fault::kill).value("KILL_NODE", Fault::kill_node)
      .value("STOP", Fault::stop).value("EXIT", Fault::exit).value("EXCEPTION", Fault::exception)
      .value("DROP", Fault::drop);

  py::class_<Group, std::shared_ptr<Group>>(m, "Group")
      .def_readonly("name", &Group::name)
      .def_readonly("rank", &Group::rank)
      .def_readonly("size", &Group::size)
      .def("adopt", &Group::adopt, py::arg("inner").none(true), NoGil())
      .def("serve", &Group::serve, py::arg("record"), py::arg("first") = std::vector<Tensors>(), NoGil())
      .def("record", &Group::record, NoGil())
      .def("first", &Group::first, NoGil())
      .def_property_readonly("inner", py::cpp_function(&Group::inner, NoGil()))
      .def_property_readonly("in_flight", py::cpp_function(&Group::in_flight, NoGil()))
      .def_property_readonly("served_mismatches", &Group::served_mismatches);

  py::class_<Journal, std::shared_ptr<Journal>>(m, "Journal")
      .def(py::init<int, int64_t, int64_t>(), py::arg("world_size"), py::arg("budget_bytes"), py::arg("record_bytes"))
      .def("group", &Journal::group, py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("poll") = false, NoGil())
      .def_property("step", &Journal::step, py::cpp_function(&Journal::set_step, NoGil()))
      .def("suspend", &Journal::suspend, NoGil())
      .def("drain", &Journal::drain, NoGil())
      .def("go_offline", &Journal::go_offline, NoGil())
      .def("go_live", &Journal::go_live, NoGil())
      .def("replay", &Journal::replay, NoGil())
      .def("wait_replayed", &Journal::wait_replayed, NoGil())
      .def("set_budget", &Journal::set_budget, NoGil())
      .def("replayable", &Journal::replayable, NoGil())
      .def("redoable", &Journal::redoable, NoGil())
      .def("set_region", &Journal::set_region, NoGil())
      .def("settled", &Journal::settled, NoGil())
      .def("all_have", &Journal::all_have, NoGil())
      .def("poison", &Journal::poison, NoGil())
      .def("wait_failure", &Journal::wait_failure, NoGil())
      .def("close", &Journal::close, NoGil())
      .def("arm", &Journal::arm, NoGil())
      .def("stats", &Journal::stats, NoGil());

  py::class_<Buddies, std::shared_ptr<Buddies>>(m, "Buddies")
      .def(py::init<std::shared_ptr<Journal>>())
      .def("add", &Buddies::add, NoGil())
      .def("clear", &Buddies::clear, NoGil())
      .def("publish", &Buddies::publish, NoGil())
      .def("wait", &Buddies::wait, NoGil());

  py::class_<JournaledBackend, c10::intrusive_ptr<JournaledBackend>, c10d::Backend>(m, "JournaledBackend",
                                                                                    py::dynamic_attr())
      .def(py::init([](std::shared_ptr<Group> group, const std::string& name) {
        return c10::make_intrusive<JournaledBackend>(std::move(group), name);
      }))
      .def("joined", [](JournaledBackend& b) { return b.attendance().joined(); }, NoGil())
      .def("oldest_wait", [](JournaledBackend& b) { return b.attendance().oldest(); }, NoGil());

  m.def("digests", &digests, NoGil());
}
