"""What pyproject.toml cannot say: the layout of the packages and the compiled kernel."""

import os
from pathlib import Path

from setuptools import Extension, find_packages, setup

# Directories at the top that install inside the package, so that no generic name is taken.
MOVED_PACKAGES = {
    "nest_megatron.hydra_configs": "hydra_configs",
    "nest_megatron.recipes": "recipes",
}

# The pure-Python solver always ships, so a machine without a compiler still gets a working
# installation; the plan records which backend solved it. Tests and CI set this to make sure.
EXTENSION_REQUIRED = os.environ.get("NEST_MEGATRON_REQUIRE_EXTENSION", "0") != "0"

# Bit equality with the reference depends on these flags: never -ffast-math, never -march=native.
STAGE_DP = Extension(
    "nest_megatron.solver._stage_dp",
    sources=["cython_ext/_stage_dp.pyx"],
    depends=sorted(map(str, Path("cython_ext").glob("*.pxd"))),
    extra_compile_args=["-O3", "-ffp-contract=off"],
    optional=not EXTENSION_REQUIRED,
)

setup(
    packages=[*find_packages(include=["nest_megatron", "nest_megatron.*"]), *MOVED_PACKAGES],
    package_dir=MOVED_PACKAGES,
    ext_modules=[STAGE_DP],
    # Generated C goes under build/, so it is never committed and never in the sdist.
    options={"build_ext": {"cython_c_in_temp": True}},
)
