// Python bindings of the heap watch. Python's own allocators are wrapped so that objects count one by one.
#include "bindings/bindings.h"
#include "common/alloc.h"
#include "common/heap_watch.h"

namespace tw {
namespace {

using heap_watch::Inner;

// The allocators of the raw, memory and object domains that were installed before ours.
PyMemAllocatorEx inner[3];
bool wrapped = false;

// Returns the allocator that was installed before ours.
PyMemAllocatorEx& inner_allocator(void* context) { return *static_cast<PyMemAllocatorEx*>(context); }

void* wrapped_malloc(void* context, std::size_t n) {
  Inner guard;
  void* p = inner_allocator(context).malloc(inner_allocator(context).ctx, n);
  if (guard.outermost()) heap_watch::note_requested(p, n);
  return p;
}

void* wrapped_calloc(void* context, std::size_t n, std::size_t each) {
  Inner guard;
  void* p = inner_allocator(context).calloc(inner_allocator(context).ctx, n, each);
  if (guard.outermost()) heap_watch::note_requested(p, n * each);
  return p;
}

void* wrapped_realloc(void* context, void* old, std::size_t n) {
  Inner guard;
  void* p = inner_allocator(context).realloc(inner_allocator(context).ctx, old, n);
  if (p && guard.outermost()) {
    if (p != old) heap_watch::forget_requested(old);
    heap_watch::note_requested(p, n);
  }
  return p;
}

void wrapped_free(void* context, void* p) {
  Inner guard;
  if (guard.outermost()) heap_watch::forget_requested(p);
  inner_allocator(context).free(inner_allocator(context).ctx, p);
}

constexpr PyMemAllocatorDomain kDomains[3] = {PYMEM_DOMAIN_RAW, PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};

void wrap_python_allocators() {
  for (int d = 0; d < 3; ++d) {
    PyMem_GetAllocator(kDomains[d], &inner[d]);
    PyMemAllocatorEx ours{&inner[d], wrapped_malloc, wrapped_calloc, wrapped_realloc, wrapped_free};
    PyMem_SetAllocator(kDomains[d], &ours);
  }
  wrapped = true;
}

void unwrap_python_allocators() {
  if (!wrapped) return;
  for (int d = 0; d < 3; ++d) PyMem_SetAllocator(kDomains[d], &inner[d]);
  wrapped = false;
}

bool watch_start(bool large_only) {
#ifdef Py_GIL_DISABLED
  if (!large_only) return false;
#endif
  if (wrapped || !heap_watch::start(large_only)) return false;
  if (!large_only) wrap_python_allocators();
  return true;
}

void watch_stop() {
  unwrap_python_allocators();
  heap_watch::stop();
}

nb::tuple watch_counts() {
  const heap_watch::Counts c = heap_watch::counts();
  return nb::make_tuple(c.system_now, c.system_peak, c.requested_now, c.requested_peak, c.blocks);
}

// At the alarm the interpreter may be in any state, so the callback is queued and runs at the next safe point.
PyObject* at_alarm = nullptr;

int run_callback(void*) {
  if (!at_alarm) return 0;
  PyObject* result = PyObject_CallNoArgs(at_alarm);
  Py_XDECREF(result);
  return result ? 0 : -1;
}

void queue_callback() { Py_AddPendingCall(run_callback, nullptr); }

void watch_alarm(int64_t level, nb::object callback) {
  Py_XDECREF(at_alarm);
  at_alarm = callback.is_none() ? nullptr : callback.release().ptr();
  heap_watch::set_alarm(at_alarm ? level : 0, queue_callback);
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("memory_in_use", memory_in_use);
  m.def("memory_peak", memory_peak);
  m.def("reset_memory_peak", reset_memory_peak);
  m.def("watch_start", watch_start, nb::arg("large_only") = false);
  m.def("watch_stop", watch_stop);
  m.def("watch_active", heap_watch::active);
  m.def("watch_counts", watch_counts);
  m.def("watch_allocated", heap_watch::allocated);
  m.def("watch_reset_peaks", heap_watch::reset_peaks);
  m.def("watch_alarm", watch_alarm, nb::arg("level"), nb::arg("callback").none());
}

}  // namespace tw
