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

# Bit equality with the reference depends on these flags: never -ffast-math, never -march=native.
STAGE_DP = Extension(
    "nest_megatron.solver._stage_dp",
    sources=["cython_ext/_stage_dp.pyx"],
    depends=sorted(map(str, Path("cython_ext").glob("*.pxd"))),
    extra_compile_args=["-O3", "-ffp-contract=off"],
    optional=not EXTENSION_REQUIRED,
)
SCHEDULE = Extension(
    "nest_megatron.cost_model._schedule",
    sources=["cython_ext/_schedule.pyx"],
    extra_compile_args=["-O3", "-ffp-contract=off"],
    optional=not EXTENSION_REQUIRED,
)
NEST_CUTS = Extension(
    "nest_megatron.research.nest_artifact._nest_cuts",
    sources=["cython_ext/_nest_cuts.pyx"],
    extra_compile_args=["-O3", "-ffp-contract=off"],
    optional=not EXTENSION_REQUIRED,
)
RECURRENCE = Extension(
    "nest_megatron.research.nest_dp._recurrence",
    sources=["cython_ext/_recurrence.pyx"],
    extra_compile_args=["-O3", "-ffp-contract=off"],
    optional=not EXTENSION_REQUIRED,
)

# One line that every start of Python runs: it looks at sys.argv, and mostly that is all.
BOOT = Path("nest_megatron/boot.pth")
INSTALLED_BOOT = "nest_megatron.pth"


class BuildWithBoot(build_py):
    """Puts the boot line beside the package, so that wheels install it and pip uninstalls it."""

    def run(self) -> None:
        """Build the modules, then copy the line."""
        super().run()
        if not self.editable_mode:
            shutil.copyfile(BOOT, Path(self.build_lib) / INSTALLED_BOOT)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """What was built, the line included."""
        boot = str(Path(self.build_lib) / INSTALLED_BOOT)
        return [*super().get_outputs(include_bytecode), boot]


class EditableWithBoot(editable_wheel):
    """The same for ``pip install --editable``.

    The plugin is copied as well: Hydra lists the folders of its namespace, and what an editable
    installation finds through an import hook is in none of them.
    """

    def _install_namespaces(self, installation_dir: str, pth_prefix: str) -> None:
        super()._install_namespaces(installation_dir, pth_prefix)
        shutil.copyfile(BOOT, Path(installation_dir) / INSTALLED_BOOT)
        plugin = Path(installation_dir) / HYDRA_PLUGIN
        plugin.mkdir(parents=True)
        shutil.copyfile(HYDRA_PLUGIN / "__init__.py", plugin / "__init__.py")


setup(
    packages=[*find_packages(include=["nest_megatron", "nest_megatron.*"]), *MOVED_PACKAGES],
    package_dir=MOVED_PACKAGES,
    ext_modules=[STAGE_DP, SCHEDULE, NEST_CUTS, RECURRENCE],
    cmdclass={"build_py": BuildWithBoot, "editable_wheel": EditableWithBoot},
    # Generated C goes under build/, so it is never committed and never in the sdist.
    options={"build_ext": {"cython_c_in_temp": True}},
)
