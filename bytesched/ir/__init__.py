"""Plans of parallel training as data, in the three phases of SuperScaler.

Operators are split, then put on ranks and in order (`transform`), and joined again by the
communication that their layouts need (`preserve`). `check` looks for what would hang, differ or not
fit; `replay` runs a plan on paper; `lower` gives it to what trains. After SuperScaler (Lin et al.,
2023) and nnScaler (Lin et al., OSDI 2024).
"""
