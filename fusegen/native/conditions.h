// Guards on Python state, checked before each call: the contents of dictionaries, objects and cells, by identity.
//
// Nearly all are on dictionaries, of which a large model has hundreds. They are rechecked only after the dictionary has changed,
// since cache misses would dominate.

#pragma once

#include "native.h"

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <vector>

namespace conditions {

// In the order of `_PLACES` of fusegen/guards/locations.py; `variables` is detected here.
enum class Place { item, attribute, type, cell, length, result, method, has, missing, defined, parameter, buffer, submodule, variables };

// Weak conditions hold a weak reference to the owner or value, and are false after its deletion.
struct Condition {
  Place place;
  PyObject *owner, *key, *value;
  int is_owner_weak = false, is_value_weak = false;
};

// The memory layout of a tensor.
struct Layout {
  PyObject *tensor;
  void *address;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

// A dictionary and its conditions, which still hold if its version is unchanged.
struct Dictionary {
  PyObject *held;
  std::vector<Condition> conditions;
  bool is_watched = false;
  uint64_t changes = 1;  // counted by the watcher
  uint64_t asked = 0;    // the last version at which all conditions held
};

struct Conditions {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *same;
  uint64_t changes, asked;  // over all dictionaries
  std::vector<Condition> *others;
  std::vector<Dictionary> *dictionaries;
  std::vector<Layout> *layouts;

  void release() {
    delete others;
    delete dictionaries;
    delete layouts;
  }
};

#if PY_VERSION_HEX < 0x030C0000
// The interpreter gives each state of a dictionary a unique version tag.
void watch(Conditions &, size_t) {}
void unwatch(Conditions &) {}

uint64_t version_of(const Dictionary &each) { return reinterpret_cast<PyDictObject *>(each.held)->ma_version_tag; }
#else
struct User {
  Conditions *conditions;
  size_t at;  // index of the dictionary
};

int watcher = -1;

auto &users() {
  static auto *all = new std::unordered_map<PyObject *, std::vector<User>>;  // leaked: dictionaries change until the interpreter ends
  return *all;
}

int note_change(PyDict_WatchEvent, PyObject *dictionary, PyObject *, PyObject *) {
  const auto found = users().find(dictionary);
  if (found == users().end()) return 0;
  for (const User &user : found->second) {
    ++(*user.conditions->dictionaries)[user.at].changes;
    ++user.conditions->changes;
  }
  return 0;
}

void watch(Conditions &self, size_t at) {
  Dictionary &each = (*self.dictionaries)[at];
  if (watcher < 0) watcher = PyDict_AddWatcher(note_change);
  if (watcher < 0 || PyDict_Watch(watcher, each.held) < 0) return PyErr_Clear();  // no free watcher
  each.is_watched = true;
  users()[each.held].push_back({&self, at});
}

void unwatch(Conditions &self) {
  for (const Dictionary &each : *self.dictionaries) {
    const auto found = users().find(each.held);
    if (found == users().end()) continue;
    auto &all = found->second;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const User &user) { return user.conditions == &self; }), all.end());
    if (!all.empty()) continue;
    PyDict_Unwatch(watcher, each.held);
    users().erase(found);
  }
}

uint64_t version_of(const Dictionary &each) { return each.is_watched ? each.changes : 0; }
#endif

// True for dictionaries without overridden access methods.
bool is_dictionary(PyObject *object) { return PyDict_CheckExact(object) || PyODict_CheckExact(object); }

// Returns a new reference to the target of a weak reference; null without an error if it was deleted.
PyObject *alive(PyObject *reference) {
#if PY_VERSION_HEX < 0x030D0000
  PyObject *found = PyWeakref_GetObject(reference);
  return found == Py_None ? nullptr : Py_XNewRef(found);
#else
  PyObject *found = nullptr;
  return PyWeakref_GetRef(reference, &found) < 0 ? nullptr : found;
#endif
}

// Returns a new reference to the value of a closure variable; null with an error.
PyObject *in_cell(PyObject *function, PyObject *key) {
  const Object cells = PyFunction_Check(function) ? Object(Py_XNewRef(PyFunction_GET_CLOSURE(function)))
                                                  : Object(PyObject_GetAttrString(function, "__closure__"));
  const Object cell = cells ? Object(PyObject_GetItem(cells, key)) : Object();
  if (!cell) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the function has no closure");
    return nullptr;
  }
  if (!PyCell_Check(cell.get())) return PyObject_GetAttrString(cell, "cell_contents");
  PyObject *found = PyCell_GET(cell.get());
  if (!found) PyErr_SetString(PyExc_ValueError, "the cell is empty");
  return Py_XNewRef(found);
}

// Returns an item of an attribute; `key` holds both names.
PyObject *within(PyObject *owner, PyObject *key) {
  const Object held(PyObject_GetAttr(owner, PyTuple_GET_ITEM(key, 0)));
  return held ? PyObject_GetItem(held, PyTuple_GET_ITEM(key, 1)) : nullptr;
}

// Returns True or False; null with an error.
PyObject *has(PyObject *owner, PyObject *key) {
  const Object found(PyObject_GetAttr(owner, key));
  if (!found && !PyErr_ExceptionMatches(PyExc_AttributeError)) return nullptr;
  PyErr_Clear();
  return PyBool_FromLong(found.get() != nullptr);
}

// Returns True if a dictionary has none of the keys.
PyObject *lacks(PyObject *owner, PyObject *keys) {
  const Object held(PyObject_CallMethod(owner, "keys", nullptr));
  return held ? PyObject_CallMethod(held, "isdisjoint", "(O)", keys) : nullptr;
}

// Returns a new reference to the value at a place; null with an error if there is none.
PyObject *read(Place place, PyObject *owner, PyObject *key) {
  switch (place) {
    case Place::item:
      return PyObject_GetItem(owner, key);
    case Place::attribute:
      return PyObject_GetAttr(owner, key);
    case Place::type:
      return Py_NewRef(reinterpret_cast<PyObject *>(Py_TYPE(owner)));
    case Place::cell:
      return in_cell(owner, key);
    case Place::result:
      return PyObject_CallObject(owner, key);
    case Place::method: {
      const Object found(PyObject_GetAttr(owner, key));
      if (!found) return nullptr;
      const bool is_its_own = PyMethod_Check(found.get()) && PyMethod_GET_SELF(found.get()) == owner;
      return Py_NewRef(is_its_own ? PyMethod_GET_FUNCTION(found.get()) : Py_None);
    }
    case Place::has:
      return has(owner, key);
    case Place::missing:
      return lacks(owner, key);
    case Place::defined:
    case Place::parameter:
    case Place::buffer:
    case Place::submodule:
      return within(owner, key);
    case Place::variables:
      return PyObject_GenericGetDict(owner, nullptr);
    case Place::length:  // handled in `holds`
      break;
  }
  PyErr_SetString(PyExc_SystemError, "unknown place");
  return nullptr;
}

// Returns 1 if a place holds a value, 0 if not, -1 with an error.
int holds(PyObject *same, Place place, PyObject *owner, PyObject *key, PyObject *value) {
  if (place == Place::length) {
    const Py_ssize_t size = is_dictionary(owner) ? PyDict_GET_SIZE(owner) : PyObject_Size(owner);
    const Py_ssize_t expected = PyLong_AsSsize_t(value);
    return size < 0 || PyErr_Occurred() ? -1 : size == expected;
  }
  PyObject *found;
  if (place == Place::item && is_dictionary(owner)) {  // the common case
    found = PyDict_GetItemWithError(owner, key);
    if (found == value) return 1;
    if (!found) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(found);
  } else if (!(found = read(place, owner, key))) {
    return -1;
  }
  const int answer = is_same(same, found, value);
  Py_DECREF(found);
  return answer;
}

int holds(const Conditions &self, const Condition &each) {
  if (!each.is_owner_weak && !each.is_value_weak) return holds(self.same, each.place, each.owner, each.key, each.value);
  const Object owner(each.is_owner_weak ? alive(each.owner) : Py_NewRef(each.owner));
  const Object value(each.is_value_weak ? alive(each.value) : Py_NewRef(each.value));
  return owner && value ? holds(self.same, each.place, owner, each.key, value) : 0;
}

// Checks the conditions of all changed dictionaries. A check may run Python code, and other threads: the version is stored only
// after all conditions held.
int dictionaries_hold(Conditions &self) {
  const uint64_t changes = self.changes;
  if (self.asked == changes) return 1;
  bool are_watched = true;
  for (Dictionary &each : *self.dictionaries) {
    are_watched &= each.is_watched;
    const uint64_t version = version_of(each);
    if (version && version == each.asked) continue;
    for (const Condition &condition : each.conditions)
      if (const int answer = holds(self, condition); answer <= 0) return answer;
    each.asked = version;
  }
  if (are_watched) self.asked = changes;
  return 1;
}

bool has_layout(const Layout &each) {
  const at::Tensor &tensor = THPVariable_Unpack(each.tensor);
  return tensor.mutable_data_ptr() == each.address && tensor.sizes() == at::IntArrayRef(each.sizes) &&
         tensor.strides() == at::IntArrayRef(each.strides) && tensor.scalar_type() == each.dtype;
}

// Returns False if the error means that a value no longer exists; null for any other error.
PyObject *gone() {
  for (PyObject *kind : {PyExc_LookupError, PyExc_AttributeError, PyExc_ValueError, PyExc_TypeError, PyExc_NameError})
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
  auto &self = *reinterpret_cast<Conditions *>(object);
  int answer = dictionaries_hold(self);
  for (size_t at = 0; answer == 1 && at < self.others->size(); ++at) answer = holds(self, (*self.others)[at]);
  if (answer < 0) return gone();
  if (!answer) Py_RETURN_FALSE;
  try {
    for (const Layout &each : *self.layouts)
      if (!has_layout(each)) Py_RETURN_FALSE;
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

// Fills a vector from a tuple of integers; returns false with an error.
bool fill(std::vector<int64_t> &numbers, PyObject *given) {
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(given); ++at) numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(given, at)));
  return !PyErr_Occurred();
}

// True if the value is the object's plain ``__dict__``.
bool are_variables(const Condition &each) {
  if (!PyUnicode_Check(each.key) || PyUnicode_CompareWithASCIIString(each.key, "__dict__")) return false;
  PyObject *found = PyObject_GenericGetDict(each.owner, nullptr);
  if (!found) PyErr_Clear();
  Py_XDECREF(found);
  return found == each.value;
}

// Conditions(same, [(place, owner, key, value, is_owner_weak, is_value_weak), ...], [(tensor, address, sizes, strides), ...])
PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *) {
  PyObject *same, *places, *tensors;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &same, &PyList_Type, &places, &PyList_Type, &tensors)) return nullptr;
  auto *self = reinterpret_cast<Conditions *>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->call = ask;
  self->changes = 1;
  self->same = Py_NewRef(same);
  self->others = new std::vector<Condition>;
  self->dictionaries = new std::vector<Dictionary>;
  self->layouts = new std::vector<Layout>;
  std::unordered_map<PyObject *, size_t> known;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(places); ++at) {
    Condition each;
    int place;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(places, at), "iOOOpp", &place, &each.owner, &each.key, &each.value, &each.is_owner_weak,
                          &each.is_value_weak)) {
      Py_DECREF(self);
      return nullptr;
    }
    each.place = static_cast<Place>(place);
    if (each.place == Place::attribute && !each.is_owner_weak && are_variables(each)) each.place = Place::variables;
    for (PyObject *held : {each.owner, each.key, each.value}) Py_INCREF(held);
    const bool is_of_entries = each.place == Place::item || each.place == Place::length || each.place == Place::missing;
    if (!is_of_entries || !is_dictionary(each.owner)) {
      self->others->push_back(each);
      continue;
    }
    const auto [found, is_new] = known.emplace(each.owner, self->dictionaries->size());
    if (is_new) {
      self->dictionaries->push_back({each.owner});
      watch(*self, found->second);
    }
    (*self->dictionaries)[found->second].conditions.push_back(each);
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
      PyErr_SetString(PyExc_TypeError, "a layout needs a tensor");
      Py_DECREF(self);
      return nullptr;
    }
    each.dtype = THPVariable_Unpack(held).scalar_type();
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
  const auto visit_all = [&](const std::vector<Condition> &all) {
    for (const Condition &each : all) {
      Py_VISIT(each.owner);
      Py_VISIT(each.key);
      Py_VISIT(each.value);
    }
    return 0;
  };
  if (self->others)
    if (const int answer = visit_all(*self->others)) return answer;
  if (self->dictionaries)
    for (const Dictionary &each : *self->dictionaries)
      if (const int answer = visit_all(each.conditions)) return answer;
  if (self->layouts)
    for (const Layout &each : *self->layouts) Py_VISIT(each.tensor);
  return 0;
}

int clear(PyObject *object) {
  auto *self = reinterpret_cast<Conditions *>(object);
  Py_CLEAR(self->same);
  std::vector<Condition> all;
  std::vector<Layout> layouts;
  if (self->others) all.swap(*self->others);  // code that runs during decref must find no references
  if (self->dictionaries) {
    unwatch(*self);
    for (const Dictionary &each : *self->dictionaries) all.insert(all.end(), each.conditions.begin(), each.conditions.end());
    self->dictionaries->clear();
  }
  if (self->layouts) layouts.swap(*self->layouts);
  for (const Condition &each : all)
    for (PyObject *held : {each.owner, each.key, each.value}) Py_DECREF(held);
  for (const Layout &each : layouts) Py_DECREF(each.tensor);
  return 0;
}

PyObject *type() { return callable_type<Conditions, clear>("fusegen_native.Conditions", make, traverse); }

}  // namespace conditions
