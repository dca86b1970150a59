// One translation unit: torch's headers take longer to parse than this code to compile.

#include "conditions.h"
#include "executor.h"
#include "form.h"
#include "recorded.h"

PyMODINIT_FUNC PyInit_fusegen_native() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fusegen_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject *module = PyModule_Create(&definition);
  if (!module) return nullptr;
  const struct {
    const char *name;
    PyObject *(*make)();
  } types[] = {{"Conditions", conditions::type}, {"Executor", executor::type}, {"Form", form::type}, {"Recorded", recorded::type}};
  for (const auto &each : types) {
    PyObject *type = each.make();
    if (!type || PyModule_AddObject(module, each.name, type) < 0) {
      Py_XDECREF(type);
      Py_DECREF(module);
      return nullptr;
    }
  }
  return module;
}
