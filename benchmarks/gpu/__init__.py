"""The library on a GPU: timed on a device, or compiled for one without a device."""
