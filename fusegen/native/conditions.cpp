// Conditions on the state of Python objects, asked before each call: what a dictionary, an object or a cell holds, by identity.

#include "native.h"

#include <exception>
#include <vector>

namespace {

// In the order of `_PLACES` of fusegen/guards/conditions.py.
enum class Place { item, attribute, type, cell, length, result };

struct Condition {
  Place place;
  PyObject *owner, *key, *value;
};

// Where a tensor lies.
struct Layout {
  PyObject *tensor;
  void *address;
  std::vector<int64_t> sizes, strides;
};

struct Conditions {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *same;
  std::vector<Condition> *all;
  std::vector<Layout> *layouts;
};

// A new reference to what a place holds; null with an error where that is nothing any more.
PyObject *read(const Condition &each) {
  PyObject *owner = each.owner, *found = nullptr;
  switch (each.place) {
    case Place::item:
      return PyObject_GetItem(owner, each.key);
    case Place::attribute:
      return PyObject_GetAttr(owner, each.key);
    case Place::type:
      return Py_NewRef(reinterpret_cast<PyObject *>(Py_TYPE(owner)));
    case Place::cell:
      found = PyCell_GET(owner);
      if (!found) PyErr_SetString(PyExc_ValueError, "the cell is empty");
      return Py_XNewRef(found);
    case Place::result:
      return PyObject_CallObject(owner, each.key);
    case Place::length:  // compared without an object
      break;
  }
  PyErr_SetString(PyExc_SystemError, "no such place");
  return nullptr;
}

// 1 where a condition holds, 0 where it does not, -1 with an error.
int holds(const Conditions &self, const Condition &each) {
  if (each.place == Place::length) {
    const Py_ssize_t size = PyObject_Size(each.owner);
    const Py_ssize_t wanted = PyLong_AsSsize_t(each.value);
    return size < 0 || PyErr_Occurred() ? -1 : size == wanted;
  }
  PyObject *found;
  if (each.place == Place::item && PyDict_CheckExact(each.owner)) {  // nearly all of them
    found = PyDict_GetItemWithError(each.owner, each.key);
    if (found == each.value) return 1;
    if (!found) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(found);
  } else if (!(found = read(each))) {
    return -1;
  }
  int answer = found == each.value;
  if (!answer && Py_TYPE(found) == Py_TYPE(each.value)) {  // else they are not the same plain value
    PyObject *equal = PyObject_CallFunctionObjArgs(self.same, found, each.value, nullptr);
    answer = equal ? PyObject_IsTrue(equal) : -1;
    Py_XDECREF(equal);
  }
  Py_DECREF(found);
  return answer;
}

bool lies_there(const Layout &each) {
  const at::Tensor &tensor = THPVariable_Unpack(each.tensor);
  return tensor.mutable_data_ptr() == each.address && tensor.sizes() == at::IntArrayRef(each.sizes) &&
         tensor.strides() == at::IntArrayRef(each.strides);
}

// False where an error says that something is not there any more; null for any other error.
PyObject *gone() {
  for (PyObject *kind : {PyExc_LookupError, PyExc_AttributeError, PyExc_ValueError, PyExc_TypeError})
    if (PyErr_ExceptionMatches(kind)) {
      PyErr_Clear();
      Py_RETURN_FALSE;
    }
  return nullptr;
}

PyObject *ask(PyObject *object, PyObject *const *, size_t count, PyObject *names) {
  if (PyVectorcall_NARGS(count) || names) {
    PyErr_SetString(PyExc_TypeError, "conditions take no arguments");
    return nullptr;
  }
  const auto &self = *reinterpret_cast<Conditions *>(object);
  for (size_t at = 0; at < self.all->size(); ++at) {
    const int answer = holds(self, (*self.all)[at]);
    if (answer < 0) return gone();
    if (!answer) Py_RETURN_FALSE;
  }
  try {
    for (const Layout &each : *self.layouts)
      if (!lies_there(each)) Py_RETURN_FALSE;
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

// Fills a vector from a tuple of integers; false with an error.
bool fill(std::vector<int64_t> &numbers, PyObject *given) {
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(given); ++at) numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(given, at)));
  return !PyErr_Occurred();
}

// Conditions(same, [(place, owner, key, value), ...], [(tensor, address, sizes, strides), ...])
PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *) {
  PyObject *same, *places, *tensors;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &same, &PyList_Type, &places, &PyList_Type, &tensors)) return nullptr;
  auto *self = reinterpret_cast<Conditions *>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->call = ask;
  self->same = Py_NewRef(same);
  self->all = new std::vector<Condition>;
  self->layouts = new std::vector<Layout>;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(places); ++at) {
    Condition each;
    int place;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(places, at), "iOOO", &place, &each.owner, &each.key, &each.value)) {
      Py_DECREF(self);
      return nullptr;
    }
    each.place = static_cast<Place>(place);
    for (PyObject *held : {each.owner, each.key, each.value}) Py_INCREF(held);
    self->all->push_back(each);
  }
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(tensors); ++at) {
    PyObject *held, *sizes, *strides;
    unsigned long long address;
    Layout each;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(tensors, at), "OKO!O!", &held, &address, &PyTuple_Type, &sizes, &PyTuple_Type, &strides) ||
        !fill(each.sizes, sizes) || !fill(each.strides, strides)) {
      Py_DECREF(self);
      return nullptr;
    }
    if (!THPVariable_Check(held)) {
      PyErr_SetString(PyExc_TypeError, "what lies somewhere is a tensor");
      Py_DECREF(self);
      return nullptr;
    }
    each.tensor = Py_NewRef(held);
    each.address = reinterpret_cast<void *>(address);
    self->layouts->push_back(std::move(each));
  }
  return reinterpret_cast<PyObject *>(self);
}

int traverse(PyObject *object, visitproc visit, void *arg) {
  auto *self = reinterpret_cast<Conditions *>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->same);
  if (self->all)
    for (const Condition &each : *self->all) {
      Py_VISIT(each.owner);
      Py_VISIT(each.key);
      Py_VISIT(each.value);
    }
  if (self->layouts)
    for (const Layout &each : *self->layouts) Py_VISIT(each.tensor);
  return 0;
}

int clear(PyObject *object) {
  auto *self = reinterpret_cast<Conditions *>(object);
  Py_CLEAR(self->same);
  std::vector<Condition> all;
  std::vector<Layout> layouts;
  if (self->all) all.swap(*self->all);  // whatever runs while references go finds none
  if (self->layouts) layouts.swap(*self->layouts);
  for (const Condition &each : all)
    for (PyObject *held : {each.owner, each.key, each.value}) Py_DECREF(held);
  for (const Layout &each : layouts) Py_DECREF(each.tensor);
  return 0;
}

void destroy(PyObject *object) {
  PyObject_GC_UnTrack(object);
  clear(object);
  auto *self = reinterpret_cast<Conditions *>(object);
  delete self->all;
  delete self->layouts;
  PyTypeObject *type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

}  // namespace

PyObject *conditions_type() { return callable_type<Conditions>("fusegen_native.Conditions", make, traverse, clear, destroy); }
