// The form of a call: the layouts of its tensor arguments, and the values of the others. It extracts the tensors of calls with the
// same form.

#pragma once

#include "native.h"

#include <exception>
#include <utility>
#include <vector>

namespace form {

// In the order of `_Argument` of fusegen/graphs/call.py.
struct Node {
  enum class Kind { identity, plain, tensor, sequence, dictionary, cache } kind;
  PyObject *value = nullptr;  // the object, or its type if only the type matters
  std::vector<PyObject *> names;
  std::vector<Node> parts;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool requires_grad = false;
};

struct Form {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *same;
  Node *positional, *named;

  void release() {
    delete positional;
    delete named;
  }
};

// Returns 1 if a value matches a node, 0 if not, -1 with an error.
int matches(const Form &self, const Node &node, PyObject *value, PyObject *tensors, PyObject *caches);

int matches_tensor(const Node &node, PyObject *value, PyObject *tensors) {
  if (reinterpret_cast<PyObject *>(Py_TYPE(value)) != node.value) return 0;
  const at::Tensor &tensor = THPVariable_Unpack(value);
  if (tensor.is_nested() || tensor.layout() != at::kStrided || tensor.is_conj() || tensor.is_neg()) return 0;
  if (tensor.sizes() != at::IntArrayRef(node.sizes) || tensor.strides() != at::IntArrayRef(node.strides)) return 0;
  if (tensor.scalar_type() != node.dtype || tensor.device() != node.device || tensor.requires_grad() != node.requires_grad) return 0;
  return PyList_Append(tensors, value) < 0 ? -1 : 1;
}

int matches_sequence(const Form &self, const Node &node, PyObject *value, PyObject *tensors, PyObject *caches) {
  if (reinterpret_cast<PyObject *>(Py_TYPE(value)) != node.value) return 0;
  if (PySequence_Fast_GET_SIZE(value) != static_cast<Py_ssize_t>(node.parts.size())) return 0;
  for (size_t at = 0; at < node.parts.size(); ++at) {
    if (PySequence_Fast_GET_SIZE(value) <= static_cast<Py_ssize_t>(at)) return 0;  // comparisons may run code that changes the list
    PyObject *part = Py_NewRef(PySequence_Fast_GET_ITEM(value, at));
    const int answer = matches(self, node.parts[at], part, tensors, caches);
    Py_DECREF(part);
    if (answer <= 0) return answer;
  }
  return 1;
}

int matches_dictionary(const Form &self, const Node &node, PyObject *value, PyObject *tensors, PyObject *caches) {
  if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) != static_cast<Py_ssize_t>(node.parts.size())) return 0;
  Py_ssize_t place = 0;
  PyObject *name, *part;
  for (size_t at = 0; at < node.parts.size(); ++at) {
    if (!PyDict_Next(value, &place, &name, &part)) return 0;
    if (name != node.names[at]) {
      const int equal = PyUnicode_CheckExact(name) ? PyObject_RichCompareBool(name, node.names[at], Py_EQ) : 0;
      if (equal <= 0) return equal;
    }
    Py_INCREF(part);
    const int answer = matches(self, node.parts[at], part, tensors, caches);
    Py_DECREF(part);
    if (answer <= 0) return answer;
  }
  return 1;
}

int matches(const Form &self, const Node &node, PyObject *value, PyObject *tensors, PyObject *caches) {
  switch (node.kind) {
    case Node::Kind::identity:
      return value == node.value;
    case Node::Kind::plain:
      return is_same(self.same, value, node.value);
    case Node::Kind::tensor:
      return matches_tensor(node, value, tensors);
    case Node::Kind::sequence:
      return matches_sequence(self, node, value, tensors, caches);
    case Node::Kind::dictionary:
      return matches_dictionary(self, node, value, tensors, caches);
    case Node::Kind::cache:
      if (reinterpret_cast<PyObject *>(Py_TYPE(value)) != node.value) return 0;
      return PyList_Append(caches, value) < 0 ? -1 : 1;
  }
  return 0;
}

// form(args, kwargs) -> (tensors, caches), or None if the call has another form.
PyObject *ask(PyObject *object, PyObject *const *arguments, size_t count, PyObject *names) {
  if (PyVectorcall_NARGS(count) != 2 || names) {
    PyErr_SetString(PyExc_TypeError, "a form takes args and kwargs");
    return nullptr;
  }
  const auto &self = *reinterpret_cast<Form *>(object);
  PyObject *tensors = PyList_New(0), *caches = PyList_New(0), *found = nullptr;
  int answer = tensors && caches ? 1 : -1;
  try {
    if (answer > 0) answer = matches(self, *self.positional, arguments[0], tensors, caches);
    if (answer > 0) answer = matches(self, *self.named, arguments[1], tensors, caches);
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    answer = -1;
  }
  if (answer >= 0) found = answer ? PyTuple_Pack(2, tensors, caches) : Py_NewRef(Py_None);
  Py_XDECREF(tensors);
  Py_XDECREF(caches);
  return found;
}

// Reads a node from Python: (kind, value), (kind, value, parts), or for a dictionary (kind, value, parts, names).
bool read(PyObject *given, Node &node) {
  int kind;
  PyObject *value, *parts = nullptr, *names = nullptr;
  if (!PyArg_ParseTuple(given, "iO|O!O!", &kind, &value, &PyTuple_Type, &parts, &PyTuple_Type, &names)) return false;
  node.kind = static_cast<Node::Kind>(kind);
  if (node.kind == Node::Kind::tensor) {
    if (!THPVariable_Check(value)) {
      PyErr_SetString(PyExc_TypeError, "not a tensor");
      return false;
    }
    const at::Tensor &tensor = THPVariable_Unpack(value);
    node.sizes = tensor.sizes().vec();
    node.strides = tensor.strides().vec();
    node.dtype = tensor.scalar_type();
    node.device = tensor.device();
    node.requires_grad = tensor.requires_grad();
    value = reinterpret_cast<PyObject *>(Py_TYPE(value));
  }
  node.value = Py_NewRef(value);
  for (Py_ssize_t at = 0; names && at < PyTuple_GET_SIZE(names); ++at) node.names.push_back(Py_NewRef(PyTuple_GET_ITEM(names, at)));
  for (Py_ssize_t at = 0; parts && at < PyTuple_GET_SIZE(parts); ++at) {
    node.parts.emplace_back();
    if (!read(PyTuple_GET_ITEM(parts, at), node.parts.back())) return false;
  }
  return true;
}

int visit(const Node &node, visitproc visit_one, void *arg) {
  if (node.value)
    if (int found = visit_one(node.value, arg)) return found;
  for (PyObject *name : node.names)
    if (int found = visit_one(name, arg)) return found;
  for (const Node &part : node.parts)
    if (int found = visit(part, visit_one, arg)) return found;
  return 0;
}

void release(Node &node) {
  Py_CLEAR(node.value);
  for (PyObject *name : node.names) Py_DECREF(name);
  node.names.clear();
  for (Node &part : node.parts) release(part);
  node.parts.clear();
}

// Form(same, args, kwargs), both as nodes.
PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *) {
  PyObject *same, *positional, *named;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &same, &PyTuple_Type, &positional, &PyTuple_Type, &named)) return nullptr;
  auto *self = reinterpret_cast<Form *>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->call = ask;
  self->same = Py_NewRef(same);
  self->positional = new Node;
  self->named = new Node;
  try {
    if (read(positional, *self->positional) && read(named, *self->named)) return reinterpret_cast<PyObject *>(self);
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  Py_DECREF(self);
  return nullptr;
}

int traverse(PyObject *object, visitproc visit_one, void *arg) {
  auto *self = reinterpret_cast<Form *>(object);
  if (int found = visit_one(reinterpret_cast<PyObject *>(Py_TYPE(object)), arg)) return found;
  if (self->same)
    if (int found = visit_one(self->same, arg)) return found;
  for (Node *node : {self->positional, self->named})
    if (node)
      if (int found = visit(*node, visit_one, arg)) return found;
  return 0;
}

int clear(PyObject *object) {
  auto *self = reinterpret_cast<Form *>(object);
  Py_CLEAR(self->same);
  for (Node *node : {self->positional, self->named})
    if (node) {
      Node taken;
      std::swap(taken, *node);  // code that runs during decref must find no references
      release(taken);
    }
  return 0;
}

PyObject *type() { return callable_type<Form, clear>("fusegen_native.Form", make, traverse); }

}  // namespace form
