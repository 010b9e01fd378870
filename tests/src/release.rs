//! The Slurm releases that the tests run: Debian root file systems, made once and kept in `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::{run_tool, target_dir};

/// A Slurm release, named after the Debian release that ships it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Release {
    /// Slurm 20.11, Debian bullseye: the last one without a `--container` of its own.
    Slurm20_11,
    /// Slurm 22.05, Debian bookworm.
    Slurm22_05,
    /// Slurm 24.11, Debian trixie.
    Slurm24_11,
    /// Slurm 26.05, Debian forky.
    Slurm26_05,
}

/// What every root file system holds beside Debian's base: Slurm itself and what the cluster needs in it.
const PACKAGES: &str = "slurmctld,slurmd,slurm-client,libslurm-dev,munge,iproute2,procps,bindfs,strace";

impl Release {
    /// All of them, oldest first.
    pub const ALL: [Release; 4] =
        [Release::Slurm20_11, Release::Slurm22_05, Release::Slurm24_11, Release::Slurm26_05];

    /// Slurm's major.minor version.
    pub fn version(self) -> &'static str {
        match self {
            Release::Slurm20_11 => "20.11",
            Release::Slurm22_05 => "22.05",
            Release::Slurm24_11 => "24.11",
            Release::Slurm26_05 => "26.05",
        }
    }

    /// The Debian release that ships it.
    pub fn debian(self) -> &'static str {
        match self {
            Release::Slurm20_11 => "bullseye",
            Release::Slurm22_05 => "bookworm",
            Release::Slurm24_11 => "trixie",
            Release::Slurm26_05 => "forky",
        }
    }

    /// Whether Slurm has a `--container` option of its own (since 21.08).
    pub fn has_container_option(self) -> bool {
        self != Release::Slurm20_11
    }

    /// Whether jobs can have a `--prefer` (since 22.05).
    pub fn has_prefer(self) -> bool {
        self != Release::Slurm20_11
    }

    /// Whether it is built with `--mpi=pmix`; Debian leaves it out of the newest.
    pub fn has_pmix(self) -> bool {
        self != Release::Slurm26_05
    }

    /// Finds a release by its version ("22.05") or by Debian's name for it.
    pub fn parse(name: &str) -> Result<Release> {
        let found = Release::ALL.into_iter().find(|r| name == r.version() || name == r.debian());
        found.with_context(|| format!("no such Slurm release: {name} (there are 20.11, 22.05, 24.11, 26.05)"))
    }

    /// The root file system of this release; made now if it is not there yet.
    pub fn rootfs(self) -> Result<PathBuf> {
        make_rootfs(self.debian(), "slurm", &format!("{PACKAGES}{}", self.pmix_packages()))
    }

    /// What `--mpi=pmix` loads and slurmd does not depend on. 22.05 opens libpmix.so, a name that only the
    /// development package has. Python is for tests that take 20.11's root for an image with an old PMIx.
    fn pmix_packages(self) -> &'static str {
        match self {
            Release::Slurm20_11 => ",libpmix2,python3",
            Release::Slurm22_05 => ",libpmix-dev",
            Release::Slurm24_11 | Release::Slurm26_05 => "",
        }
    }
}

/// A Debian root file system with these packages, `target/rootfs/NAME-DEBIAN`; made if it is not there yet.
pub fn make_rootfs(debian: &str, name: &str, packages: &str) -> Result<PathBuf> {
    make_tree("minbase", "main", debian, name, packages, None)
}

/// A machine of Debian bookworm as the tests of packages want it: it has rpm, too, and an AppArmor that knows no user namespaces.
pub fn packages_rootfs() -> Result<PathBuf> {
    make_rootfs("bookworm", "packages", &format!("{PACKAGES},rpm,apparmor"))
}

/// A machine of an Ubuntu release with the Slurm of that.
pub fn ubuntu_rootfs(ubuntu: &str) -> Result<PathBuf> {
    // There, apt is no part of "minbase".
    make_ubuntu("minbase", ubuntu, "slurm", &format!("{PACKAGES},apt,apparmor"))
}

/// The files of packages of an Ubuntu release, and of what they depend on, as they are in the packages.
pub fn extract_ubuntu(ubuntu: &str, name: &str, packages: &str) -> Result<PathBuf> {
    make_ubuntu("extract", ubuntu, name, packages)
}

/// Debian vouches for the keys of Ubuntu's archive.
fn make_ubuntu(variant: &str, ubuntu: &str, name: &str, packages: &str) -> Result<PathBuf> {
    let keys = extract_packages("trixie", "ubuntu-keyring", "ubuntu-keyring")?;
    make_once(&format!("{name}-{ubuntu}"), packages, |root| {
        eprintln!("making a root file system: Ubuntu {ubuntu} with {packages} ...");
        let mut make = Command::new("mmdebstrap");
        make.args([&format!("--variant={variant}"), "--components=main universe", "--quiet"])
            .arg(format!("--keyring={}/usr/share/keyrings/ubuntu-archive-keyring.gpg", keys.display()))
            .arg(format!("--include={packages}"))
            .arg(ubuntu)
            .arg(root); // from where mmdebstrap knows that Ubuntu is
        run_tool(&mut make).map(drop)
    })
}

/// The files of packages that Debian has outside its main component too, and of what they depend on, as they are in the
/// packages: `target/rootfs/NAME-DEBIAN`, to be laid below a root file system of the same release.
pub fn extract_packages(debian: &str, name: &str, packages: &str) -> Result<PathBuf> {
    make_tree("extract", "main contrib non-free", debian, name, packages, None)
}

/// The same for another machine than this one (Debian's name for it), whose programs need not run here.
pub fn extract_foreign(debian: &str, name: &str, packages: &str, architecture: &str) -> Result<PathBuf> {
    make_tree("extract", "main", debian, name, packages, Some(architecture))
}

/// The files of these packages and of all that they need, as the mirror has them.
pub(crate) fn fetch_packages(debian: &str, name: &str, packages: &str) -> Result<PathBuf> {
    let root = make_tree("fetch", "main", debian, name, packages, None)?;
    Ok(root.join("var/cache/apt/archives"))
}

/// A node with Slurm 22.05, MPICH and the libraries and programs for InfiniBand. Python is for tests that take it for an
/// image.
pub fn hpc_rootfs() -> Result<PathBuf> {
    make_rootfs("bookworm", "hpc", &format!("{PACKAGES},ibverbs-providers,ibverbs-utils,libmpich12,python3"))
}

/// A node of this release with Open MPI's mpirun and MPICH's mpiexec. Python is for tests that take it for an image.
pub fn mpirun_rootfs(release: Release) -> Result<PathBuf> {
    let packages = format!("{PACKAGES}{},openmpi-bin,mpich,python3", release.pmix_packages());
    make_rootfs(release.debian(), "mpirun", &packages)
}

/// The files of an image with mpi4py and the Open MPI of Debian trixie.
pub fn trixie_mpi_rootfs() -> Result<PathBuf> {
    make_rootfs("trixie", "mpi", "python3-mpi4py,python3-numpy")
}

/// The files of an image with the package manager of Fedora and its relatives, which Debian has too, and what makes packages for it.
pub fn dnf_rootfs() -> Result<PathBuf> {
    make_rootfs("bookworm", "dnf", "dnf,rpm,createrepo-c,passwd,libcap2-bin")
}

/// A machine with Slurm 22.05 and what a site may have beside it: it can make and mount EROFS images, mounts what is asked
/// for (autofs), and has Slurm's REST interface.
pub fn site_rootfs() -> Result<PathBuf> {
    make_rootfs("bookworm", "site", &format!("{PACKAGES},autofs,erofs-utils,slurmrestd"))
}

/// A node of this release as configuration management meets it: with sshd and Python.
pub fn fleet_rootfs(release: Release) -> Result<PathBuf> {
    make_rootfs(release.debian(), "fleet", &format!("{PACKAGES},openssh-server,python3,python3-apt"))
}

/// What another machine needs beside Slurm to start it. Its packages are unpacked and not configured, which needs that machine.
const FOREIGN: &str = "base-files,base-passwd,bash,coreutils,dash,diffutils,findutils,grep,hostname,libc-bin,mawk,sed,tar,util-linux,binutils,\
                       slurmctld,slurmd,slurm-client,munge,iproute2,procps";

/// A root file system with Slurm for another machine than this one (Debian's name for it).
pub fn foreign_rootfs(release: Release, architecture: &str) -> Result<PathBuf> {
    extract_foreign(release.debian(), &format!("slurm-{architecture}"), FOREIGN, architecture)
}

fn make_tree(
    variant: &str,
    components: &str,
    debian: &str,
    name: &str,
    packages: &str,
    architecture: Option<&str>,
) -> Result<PathBuf> {
    make_once(&format!("{name}-{debian}"), packages, |root| {
        eprintln!("making a root file system: Debian {debian} with {packages} ...");
        let mut make = Command::new("mmdebstrap");
        let variant = match variant {
            // What was unpacked stays beside what it was unpacked from.
            "fetch" => {
                make.arg("--skip=essential/unlink,cleanup/apt");
                "extract"
            }
            variant => variant,
        };
        make.args([&format!("--variant={variant}"), &format!("--components={components}"), "--quiet"])
            // Debian testing's indexes expire sooner than mirrors and caches are renewed.
            .arg("--aptopt=Acquire::Check-Valid-Until \"false\"")
            .arg(format!("--include={packages}"))
            .args(architecture.map(|name| format!("--architectures={name}")))
            .arg(debian)
            .arg(root);
        if let Some(mirror) = debian_mirror()? {
            make.arg(format!("deb {mirror} {debian} {components}"));
        }
        run_tool(&mut make).map(drop)
    })
}

/// The tree `target/rootfs/NAME`, which `make` makes unless it is there and was made of this recipe.
pub(crate) fn make_once(name: &str, recipe: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let store = target_dir().join("rootfs");
    fs::create_dir_all(&store)?;
    let root = store.join(name);
    let made_of = root.with_extension("packages");
    let _lock = lock(&root.with_extension("lock"))?;
    if fs::read_to_string(&made_of).is_ok_and(|made_of| made_of == recipe) {
        return Ok(root);
    }
    let _ = fs::remove_file(&made_of);
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
    }
    make(&root).context("cannot make a root file system")?;
    fs::write(&made_of, recipe)?; // last: its presence says that the tree is whole
    Ok(root)
}

/// Two tests may want the same thing at once: one makes it, the other waits for it.
pub(crate) fn lock(file: &Path) -> Result<Flock<fs::File>> {
    Flock::lock(fs::File::create(file)?, FlockArg::LockExclusive).map_err(|(_, e)| e).context("flock")
}

/// The Debian mirror of this machine's own apt configuration. None on other distributions: mmdebstrap then
/// knows where Debian is.
pub(crate) fn debian_mirror() -> Result<Option<String>> {
    let listing = run_tool(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(ORIGIN)|$(LABEL)|$(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    if listing.trim().is_empty() {
        bail!("apt knows no package index here; run `apt-get update` first");
    }
    Ok(listing.lines().find_map(|line| line.strip_prefix("Debian|Debian|")).map(str::to_owned))
}

impl std::fmt::Display for Release {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Slurm {}", self.version())
    }
}
