//! What a program in the image needs in order to find Slurm's PMIx server on the node, and where the two do not fit.
//!
//! The server speaks TCP on the loopback, but shares files too, and names components of its own PMIx library that the
//! image's library need not have: without this module MPI programs fail, or print a warning for every rank.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::host::Host;
use crate::image::{Metadata, Tree, resolve};
use crate::plan::Identity;
use crate::slurm::conf;

/// What the presence of a PMIx server changes in a container.
#[derive(Default)]
pub struct Mpi {
    /// Directories of the node, to be mounted where they are.
    pub directories: Vec<(PathBuf, &'static str)>,
    /// Variables with other values than the server gave them.
    pub variables: Vec<(OsString, OsString)>,
    /// What will not work.
    pub notes: Vec<String>,
}

/// Decides it; nothing is changed in a step that has no server.
pub fn decide(tree: &dyn Tree, metadata: &Metadata, host: &Host, identity: &Identity) -> Mpi {
    let variable =
        |name: &str| host.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let Some(server) = variable("PMIX_SERVER_TMPDIR").map(PathBuf::from).filter(|path| path.is_absolute())
    else {
        return Mpi::default();
    };
    let mut mpi = Mpi::default();
    mpi.directories.push((server, "default: PMIx"));
    mpi.directories.extend(session_directory(host).map(|directory| (directory, "default: the MPI session")));
    let image = Libraries::of(tree, metadata);
    if identity.inside_uid == identity.uid {
        // Enough for a client with the same user id, and in every library.
        if variable("PMIX_SECURITY_MODE").is_some_and(|list| words(list).any(|word| word == "native")) {
            mpi.variables.push(("PMIX_SECURITY_MODE".into(), "native".into()));
        }
    } else {
        // Munge knows who the client is, whatever it claims.
        mpi.directories
            .push((PathBuf::from("/run/munge"), "default: PMIx, for a client that claims to be root"));
    }
    if let Some(modules) = variable("PMIX_GDS_MODULE")
        && let Some(first) = words(modules).next()
        && image.lacks_component(&format!("mca_gds_{first}.so"))
    {
        mpi.variables.push(("PMIX_GDS_MODULE".into(), "hash".into()));
    }
    let version = variable("PMIX_VERSION").map(|version| version.to_string_lossy().into_owned());
    mpi.notes.extend(image.misfit(&version.unwrap_or_default()));
    mpi.directories.retain(|(directory, _)| directory.is_dir());
    mpi
}

fn words(list: &OsStr) -> impl Iterator<Item = &str> {
    list.to_str().unwrap_or_default().split(',')
}

/// Where Slurm lets an MPI library keep its files: no variable names it where slurm.conf does.
fn session_directory(host: &Host) -> Option<PathBuf> {
    let variable =
        |name: &str| host.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let step = [variable("SLURM_JOB_ID")?, variable("SLURM_STEP_ID")?].map(|part| part.to_string_lossy());
    let name = format!("spmix_appdir_{}_{}", host.uid, step.join("."));
    let conf = conf::read(&host.environment).unwrap_or_default();
    let places =
        [variable("SLURM_PMIX_TMPDIR").map(PathBuf::from), conf::value(&conf, "TmpFS").map(PathBuf::from)];
    places.into_iter().flatten().map(|place| place.join(&name)).find(|directory| directory.is_dir())
}

/// The MPI and PMIx libraries of an image, by their files' names.
struct Libraries {
    /// Components of PMIx; empty where it has them built in.
    pmix_components: Vec<String>,
    /// Components of Open MPI that talk to PMIx, with their directory.
    openmpi_components: Vec<PathBuf>,
    mpich: Option<PathBuf>,
    has_pmix: bool,
}

impl Libraries {
    fn of(tree: &dyn Tree, metadata: &Metadata) -> Libraries {
        let own = metadata.environment.iter().filter(|(name, _)| name == "LD_LIBRARY_PATH");
        let own = own.flat_map(|(_, value)| std::env::split_paths(value).collect::<Vec<_>>());
        let multiarch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let usual = [multiarch.as_str(), "/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/local/lib64"];
        let directories: Vec<PathBuf> =
            own.chain(usual.map(PathBuf::from)).filter(|directory| directory.is_absolute()).collect();
        let mut found = Libraries {
            pmix_components: Vec::new(),
            openmpi_components: Vec::new(),
            mpich: None,
            has_pmix: false,
        };
        for directory in directories {
            for (below, prefix) in [("pmix", "mca_gds_"), ("pmix2/lib/pmix", "mca_gds_")] {
                found.pmix_components.extend(files(tree, &directory.join(below), prefix));
            }
            for below in ["openmpi", "openmpi/lib/openmpi", "openmpi/lib/openmpi3"] {
                let directory = directory.join(below);
                let components = files(tree, &directory, "mca_pmix_");
                found.openmpi_components.extend(components.into_iter().map(|name| directory.join(name)));
            }
            for below in ["", "pmix2/lib"] {
                found.has_pmix |= exists(tree, &directory.join(below).join("libpmix.so.2"));
            }
            let mpich = directory.join("libmpich.so.12");
            if exists(tree, &mpich) {
                found.mpich.get_or_insert(mpich);
            }
        }
        found
    }

    /// Whether the image's PMIx has components in files, and this one not among them.
    fn lacks_component(&self, name: &str) -> bool {
        !self.pmix_components.is_empty() && !self.pmix_components.iter().any(|component| component == name)
    }

    /// Why ranks would not find each other.
    fn misfit(&self, server: &str) -> Option<String> {
        let name = |path: &PathBuf| {
            path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
        };
        let first = |path: &&PathBuf| name(path).starts_with("mca_pmix_pmix1");
        if let Some(old) = self.openmpi_components.iter().find(first)
            && self.openmpi_components.iter().all(|path| first(&path) || !speaks_pmix(&name(path)))
        {
            let digits = name(old).trim_start_matches("mca_pmix_pmix").trim_end_matches(".so").to_owned();
            let version: Vec<String> = digits.chars().map(String::from).collect();
            return Some(format!(
                "the image's Open MPI has PMIx {} ({}), which cannot talk to Slurm's PMIx {server}",
                version.join("."),
                old.display(),
            ));
        }
        let mpich = self.mpich.as_ref().filter(|_| !self.has_pmix && self.openmpi_components.is_empty())?;
        Some(format!(
            "the image's MPICH ({}) speaks PMI, and not PMIx as Slurm does here; use --mpi=pmi2",
            mpich.display()
        ))
    }
}

/// Open MPI's components for PMIx 2 and later.
fn speaks_pmix(component: &str) -> bool {
    ["mca_pmix_ext", "mca_pmix_pmix"].iter().any(|prefix| {
        component
            .strip_prefix(prefix)
            .is_some_and(|rest| rest.starts_with(|digit: char| ('2'..='9').contains(&digit)))
    })
}

fn exists(tree: &dyn Tree, path: &Path) -> bool {
    resolve(tree, path).is_ok_and(|found| found.entry.is_some())
}

fn files(tree: &dyn Tree, directory: &Path, prefix: &str) -> Vec<String> {
    let Ok(found) = resolve(tree, directory) else { return Vec::new() };
    let listed = tree.list(&found.path).unwrap_or_default();
    let names = listed.into_iter().filter(|(name, _)| name.as_bytes().starts_with(prefix.as_bytes()));
    names.filter_map(|(name, _)| name.into_string().ok()).collect()
}
