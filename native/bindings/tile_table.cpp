#include "bindings/tile_table.h"

#include <algorithm>
#include <new>

#include "bindings/arguments.h"
#include "bindings/bindings.h"

namespace tw {
namespace {

PyCFunction entry(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

TileTable& table_of(PyObject* self) { return *reinterpret_cast<TileTable*>(self); }

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"ask", "least_work", "calls_before_asking", nullptr};
  PyObject* ask = nullptr;
  long long least_work = 0, calls_before_asking = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|LL:TileTable", const_cast<char**>(names), &ask, &least_work,
                                   &calls_before_asking)) {
    return nullptr;
  }
  if (!PyCallable_Check(ask))
    return refuse("ConfigurationError", "a tile chooser must be callable, but %R is not", ask);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  TileTable& table = table_of(self);
  Py_INCREF(ask);
  table.ask = ask;
  table.least_work = std::max<int64_t>(least_work, kTinyProduct);
  table.calls_before_asking = calls_before_asking;
  table.products = new (std::nothrow) ProductTable();
  table.convolutions = new (std::nothrow) ConvTable();
  if (table.products != nullptr && table.convolutions != nullptr) return self;
  Py_DECREF(self);
  return PyErr_NoMemory();
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(table_of(self).ask);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(table_of(self).ask);
  return 0;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  delete table_of(self).products;
  delete table_of(self).convolutions;
  delete table_of(self).int8_products;
  type->tp_free(self);
  Py_DECREF(type);
}

Py_ssize_t length(PyObject* self) {
  const TileTable& table = table_of(self);
  const int64_t int8_products = table.int8_products == nullptr ? 0 : table.int8_products->size();
  return static_cast<Py_ssize_t>(table.products->size() + table.convolutions->size() + int8_products);
}

PyMethodDef methods[] = {
    {"matmul", entry(table_matmul), METH_FASTCALL | METH_KEYWORDS,
     "matmul(a, b, *, bias=None, activation=None, residual=None), with the chooser's tile"},
    {"conv2d", entry(table_conv2d), METH_FASTCALL | METH_KEYWORDS,
     "conv2d(x, w, bias=None, ...), with the chooser's tile"},
    {"keep_matmul", entry(table_keep_matmul), METH_FASTCALL | METH_KEYWORDS,
     "keep_matmul((m, n, k), layout, threads, tile)"},
    {"keep_conv2d", entry(table_keep_conv2d), METH_FASTCALL | METH_KEYWORDS, "keep_conv2d(shape, threads, tile)"},
    {"keep_int8", entry(table_keep_int8), METH_FASTCALL | METH_KEYWORDS, "keep_int8((m, n, k), threads, tile)"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_sq_length, reinterpret_cast<void*>(length)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};

PyType_Spec spec = {"tilewise._native.TileTable", sizeof(TileTable), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

PyTypeObject* table_type = nullptr;  // lives as long as the module, which is for ever

}  // namespace

TileTable* tile_table_in(PyObject* object) {
  if (object == Py_None) return nullptr;
  if (!PyObject_TypeCheck(object, table_type)) throw nb::type_error("a table of tiles must be a TileTable");
  return &table_of(object);
}

PyObject* ask_chooser(TileTable& table, const char* op, PyObject* shape, const char* layout) {
  if (shape == nullptr) return nullptr;
  if (table.ask == nullptr) {  // taken apart by the garbage collector
    Py_DECREF(shape);
    Py_RETURN_NONE;
  }
  PyObject* ask = table.ask;
  Py_INCREF(ask);
  PyObject* answer = PyObject_CallFunction(ask, "sNss", op, shape, "float32", layout);
  Py_DECREF(ask);
  return answer;
}

void bind_tile_table(nb::module_& m) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(m.ptr(), "TileTable", type) < 0) throw nb::python_error();
  table_type = reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace tw
