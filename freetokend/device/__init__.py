"""Memory of the devices: arenas of address space that is given memory and freed of it, and copies.

`host` is ordinary memory standing for a device; `cuda` is a GPU through its driver.
"""
