#include "bindings/tile_table.h"

#include <algorithm>

namespace tw {
namespace {

PyMethodDef methods[] = {
    method<table_matmul>("matmul",
                         "matmul(a, b, *, bias=None, activation=None, residual=None), with the chooser's tile"),
    method<table_conv2d>("conv2d", "conv2d(x, w, bias=None, ...), with the chooser's tile"),
    method<table_keep_matmul>("keep_matmul", "keep_matmul((m, n, k), layout, threads, tile)"),
    method<table_keep_conv2d>("keep_conv2d", "keep_conv2d(shape, threads, tile)"),
    method<table_keep_int8>("keep_int8", "keep_int8((m, n, k), threads, tile)"),
    {nullptr, nullptr, 0, nullptr}};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) Py_VISIT(table_of(self).ask.ptr());
  return 0;
}

int clear(PyObject* self) {
  table_of(self).ask.reset();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};

}  // namespace

TileTable::TileTable(nb::object ask, int64_t least_work, int64_t calls_before_asking)
    : ask(std::move(ask)), least_work(std::max(least_work, kTinyProduct)), calls_before_asking(calls_before_asking) {
  if (!PyCallable_Check(this->ask.ptr()))
    refuse("ConfigurationError", "a tile chooser must be callable, but %R is not", this->ask.ptr());
}

nb::object TileTable::ask_chooser(const char* op, const nb::tuple& shape, const char* layout) {
  if (!ask.is_valid()) return nb::none();  // cleared by the garbage collector
  return nb::object(ask)(op, shape, "float32", layout);
}

void bind_tile_table(nb::module_& m) {
  nb::class_<TileTable>(m, "TileTable", nb::type_slots(slots))
      .def(nb::init<nb::object, int64_t, int64_t>(), nb::arg("ask"), nb::arg("least_work") = 0,
           nb::arg("calls_before_asking") = 0)
      .def("__len__", [](const TileTable& table) {
        const int64_t int8_products = table.int8_products == nullptr ? 0 : table.int8_products->size();
        return table.products.size() + table.convolutions.size() + int8_products;
      });
}

}  // namespace tw
