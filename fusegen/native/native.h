// Helpers for the types of the native module.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <string>
#include <utility>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

[[noreturn]] inline void fail(PyObject *kind, const std::string &message) {
  PyErr_SetString(kind, message.c_str());
  throw python_error();
}

// An owned reference.
class Object {
 public:
  Object(PyObject *object = nullptr) : object_(object) {}
  Object(Object &&other) noexcept : object_(other.release()) {}
  Object &operator=(Object &&other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  PyObject *get() const { return object_; }
  operator PyObject *() const { return object_; }
  PyObject *release() { return std::exchange(object_, nullptr); }

 private:
  PyObject *object_;
};

inline Object checked(PyObject *made) {
  if (!made) throw python_error();
  return Object(made);
}

// A callable type that supports garbage collection.
//
// Object: begins with `PyObject_HEAD`, and has a `vectorcallfunc call`, which `make` sets.
// `clear` drops all references; `release` frees the memory that `Object` owns.
template <typename Object, inquiry clear>
PyObject *callable_type(const char *name, newfunc make, traverseproc traverse) {
  const destructor destroy = [](PyObject *object) {
    PyObject_GC_UnTrack(object);
    clear(object);
    reinterpret_cast<Object *>(object)->release();
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
  };
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Object, call), READONLY, nullptr},
                                  {nullptr, 0, 0, 0, nullptr}};
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void *>(make)},
                         {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
                         {Py_tp_traverse, reinterpret_cast<void *>(traverse)},
                         {Py_tp_clear, reinterpret_cast<void *>(clear)},
                         {Py_tp_dealloc, reinterpret_cast<void *>(destroy)},
                         {Py_tp_members, members},
                         {0, nullptr}};
  PyType_Spec spec = {name, sizeof(Object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  return PyType_FromSpec(&spec);
}

// Fast path of `same` in fusegen/guards/values.py: 1 if two values are one object or the same plain value, 0 if not, -1 with an
// error.
inline int is_same(PyObject *same, PyObject *one, PyObject *other) {
  if (one == other) return 1;
  if (Py_TYPE(one) != Py_TYPE(other)) return 0;
  if (PyLong_CheckExact(one) || PyUnicode_CheckExact(one)) return PyObject_RichCompareBool(one, other, Py_EQ);
  PyObject *equal = PyObject_CallFunctionObjArgs(same, one, other, nullptr);
  const int answer = equal ? PyObject_IsTrue(equal) : -1;
  Py_XDECREF(equal);
  return answer;
}
