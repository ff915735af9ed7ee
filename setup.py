"""What pyproject.toml cannot say: the layout of the packages and the compiled kernel."""

import os
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

# Where Hydra looks for plugins: a namespace that all of them share, so it has no __init__.py.
HYDRA_PLUGIN = Path("hydra_plugins/nest_megatron")

# Directories at the top that install inside the package, so that no generic name is taken.
MOVED_PACKAGES = {
    "nest_megatron.hydra_configs": "hydra_configs",
    "nest_megatron.hydra_configs.hydra_app": "hydra_configs/hydra_app",
    "nest_megatron.recipes": "recipes",
    "hydra_plugins.nest_megatron": str(HYDRA_PLUGIN),
}

# The pure-Python solver always ships, so a machine without a compiler still gets a working
# installation; the plan records which backend solved it. Tests and CI set this to make sure.
EXTENSION_REQUIRED = os.environ.get("NEST_MEGATRON_REQUIRE_EXTENSION", "0") != "0"

# The compiled kernels: extension module -> source.
KERNELS = {
    "nest_megatron.solver._stage_dp": "cython_ext/_stage_dp.pyx",
    "nest_megatron.cost_model._schedule": "cython_ext/_schedule.pyx",
    "nest_megatron.research.nest_artifact._stage_boundaries": "cython_ext/_stage_boundaries.pyx",
    "nest_megatron.research.nest_dp._recurrence": "cython_ext/_recurrence.pyx",
}
# Cython's directives, for every kernel; no source repeats them.
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "nonecheck": False,
    "overflowcheck": False,
    "cdivision": True,
    "embedsignature": False,
    "binding": False,
}
# Bit equality with the reference depends on these flags: never -ffast-math, never -march=native.
C_FLAGS = ["-O3", "-ffp-contract=off"]

# NEST_MEGATRON_DEBUG_KERNEL=1 builds kernels that check indices and memoryviews, with symbols and
# the compiler's checks of undefined behaviour, overflow among it; results stay the same.
if os.environ.get("NEST_MEGATRON_DEBUG_KERNEL", "0") != "0":
    DIRECTIVES |= dict.fromkeys(("boundscheck", "initializedcheck", "nonecheck"), True)
    C_FLAGS = ["-O1", "-g", "-ffp-contract=off", "-fsanitize=undefined", "-fno-sanitize-recover"]

EXTENSIONS = [
    Extension(name, sources=[source], extra_compile_args=C_FLAGS, optional=not EXTENSION_REQUIRED)
    for name, source in KERNELS.items()
]

# One line that every start of Python runs: it looks at sys.argv, and mostly that is all.
BOOT = Path("nest_megatron/boot.pth")
INSTALLED_BOOT = "nest_megatron.pth"

# NEST_MEGATRON_NO_BOOT=1 installs without it: jobs are then launched through the runner
# (`python -m nest_megatron SCRIPT`, docs/launching.md).
WITH_BOOT = os.environ.get("NEST_MEGATRON_NO_BOOT", "0") in ("", "0")


class BuildWithBoot(build_py):
    """Puts the boot line beside the package, so that wheels install it and pip uninstalls it."""

    def run(self) -> None:
        """Build the modules, then copy the line."""
        super().run()
        if WITH_BOOT and not self.editable_mode:
            shutil.copyfile(BOOT, Path(self.build_lib) / INSTALLED_BOOT)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What was built, the line included."""
        boot = [str(Path(self.build_lib) / INSTALLED_BOOT)] if WITH_BOOT else []
        return [*super().get_outputs(include_bytecode), *boot]


class EditableWithBoot(editable_wheel):
    """The same for ``pip install --editable``.

    The plugin is copied as well: Hydra lists the folders of its namespace, and what an editable
    installation finds through an import hook is in none of them.
    """

    def _install_namespaces(self, installation_dir: str, pth_prefix: str) -> None:
        super()._install_namespaces(installation_dir, pth_prefix)
        if WITH_BOOT:
            shutil.copyfile(BOOT, Path(installation_dir) / INSTALLED_BOOT)
        plugin = Path(installation_dir) / HYDRA_PLUGIN
        plugin.mkdir(parents=True)
        shutil.copyfile(HYDRA_PLUGIN / "__init__.py", plugin / "__init__.py")


setup(
    packages=[*find_packages(include=["nest_megatron", "nest_megatron.*"]), *MOVED_PACKAGES],
    package_dir=MOVED_PACKAGES,
    ext_modules=EXTENSIONS,
    cmdclass={"build_py": BuildWithBoot, "editable_wheel": EditableWithBoot},
    # Generated C goes under build/, so it is never committed and never in the sdist.
    options={"build_ext": {"cython_c_in_temp": True, "cython_directives": DIRECTIVES}},
)
