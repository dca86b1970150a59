"""Verification: compares every prebuilt kernel on a device with float64 and torch eager, and stores a record."""
