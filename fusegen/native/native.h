// The types of the native module.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <torch/csrc/autograd/python_variable.h>

// New references; null with an error.
PyObject *conditions_type();
PyObject *form_type();
