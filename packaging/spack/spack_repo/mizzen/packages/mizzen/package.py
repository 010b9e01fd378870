# Licensed as mizzen is: Apache-2.0 OR MIT.

from spack_repo.builtin.build_systems.makefile import MakefilePackage

from spack.package import *


class Mizzen(MakefilePackage):
    """Containers native to Slurm: a SPANK plugin, a launcher and an importer.

    slurmd and slurmstepd load the plugin as root, so the prefix and all directories above it must belong to root and be
    writable by nobody else. The line for plugstack.conf, and the settings with every key, are below the prefix in etc."""

    # There is no address to fetch from: `spack develop --path SOURCES mizzen@main`.
    manual_download = True

    license("Apache-2.0 OR MIT", checked_by="mizzen")

    version("main")

    depends_on("c", type="build")
    depends_on("rust@1.88:", type="build")

    conflicts("platform=darwin", msg="the launcher needs Linux")
    conflicts("platform=windows", msg="the launcher needs Linux")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        # Crates are fetched into the stage, not into the home of who builds.
        env.set("CARGO_HOME", join_path(self.stage.path, "cargo"))

    # The Makefile keeps make's own jobs from cargo.
    def build(self, spec, prefix):
        make("build", extra_env={"CARGO_BUILD_JOBS": str(make_jobs)})

    # What `make install` puts into /etc is an administrator's to copy there; a package writes to its prefix alone.
    def install(self, spec, prefix):
        make("install", f"PREFIX={prefix}", f"SYSCONFDIR={prefix.etc}")

    def test_version(self):
        """see whether the launcher starts"""
        mizzen = which(self.prefix.bin.mizzen, required=True)
        assert "mizzen " in mizzen("--version", output=str.split)
