//! What a program in the image needs in order to find the process manager that has started it, and where the two do not fit.
//! The manager is Slurm, or an mpirun or mpiexec of the node.
//!
//! A PMIx server speaks TCP on the loopback, but shares files too, and names components of its own PMIx library that the
//! image's library need not have: without this module MPI programs fail, or print a warning for every rank. MPICH's mpiexec
//! speaks PMI over a descriptor, and shares no files.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::config::Compatible;
use mizzen_core::fs_server;

use crate::elf::Library;
use crate::host::Host;
use crate::image::{Metadata, Tree, resolve};
use crate::plan::Identity;
use crate::trace::OrDebug;

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

/// Who has started the program, as far as it shapes the container.
enum Manager {
    /// Slurm, with a PMIx server.
    Slurm,
    /// An mpirun of Open MPI, whose daemons are PMIx servers.
    OpenMpi,
    /// An mpiexec of MPICH or one of its kin, with PMI.
    Hydra,
}

impl Manager {
    fn of<'a>(variable: impl Fn(&str) -> Option<&'a OsString>) -> Option<Manager> {
        let has = |name: &str| variable(name).is_some();
        if has("OMPI_COMM_WORLD_LOCAL_SIZE") {
            return Some(Manager::OpenMpi);
        }
        if has("MPI_LOCALNRANKS") && (has("PMI_FD") || has("PMI_PORT")) {
            return Some(Manager::Hydra);
        }
        has("PMIX_SERVER_TMPDIR").then_some(Manager::Slurm)
    }

    /// Whose PMIx it is, and the option of `be root inside` where it has started the program.
    fn names(&self) -> (&'static str, &'static str) {
        match self {
            Manager::Slurm => ("Slurm's PMIx", "--container-remap-root"),
            Manager::OpenMpi | Manager::Hydra => ("mpirun's PMIx", "--remap-root"),
        }
    }
}

/// Names the directories that Open MPI's mpirun shares with its ranks.
const SESSION_DIRECTORIES: [&str; 3] =
    ["OMPI_MCA_orte_top_session_dir", "OMPI_MCA_orte_jobfam_session_dir", "PMIX_SERVER_TMPDIR"];

/// What scripts for pyxis find set to the same as the server's variables. A PMIx library looks at these itself; as parameters
/// they would have it complain about components that it lacks.
const PARAMETERS: [(&str, &str); 3] = [
    ("PMIX_SECURITY_MODE", "PMIX_MCA_psec"),
    ("PMIX_GDS_MODULE", "PMIX_MCA_gds"),
    ("PMIX_PTL_MODULE", "PMIX_MCA_ptl"),
];

/// Decides it; nothing is changed for a program that nobody has started as a rank.
pub fn decide(
    tree: &dyn Tree,
    metadata: &Metadata,
    host: &Host,
    identity: &Identity,
    compatible: Compatible,
) -> Mpi {
    let variable =
        |name: &str| host.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value);
    let path = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let mut mpi = Mpi::default();
    let Some(manager) = Manager::of(variable) else { return mpi };
    match manager {
        Manager::Hydra => {
            mpi.notes.extend(Libraries::of(tree, metadata).misfit_to_hydra());
            return mpi;
        }
        Manager::Slurm => {
            let Some(server) = path("PMIX_SERVER_TMPDIR") else { return mpi };
            mpi.directories.push((server, "default: PMIx"));
            let session = session_directory(host);
            mpi.directories.extend(session.map(|directory| (directory, "default: the MPI session")));
        }
        Manager::OpenMpi => {
            let directories = SESSION_DIRECTORIES.into_iter().filter_map(path);
            mpi.directories.extend(directories.map(|directory| (directory, "default: the MPI session")));
        }
    }
    let image = Libraries::of(tree, metadata);
    let version = variable("PMIX_VERSION").map(|version| version.to_string_lossy().into_owned());
    let version = version.unwrap_or_default();
    if identity.inside_uid == identity.uid {
        // Enough for a client with the same user id, and in every library.
        if variable("PMIX_SECURITY_MODE").is_some_and(|list| words(list).any(|word| word == "native")) {
            mpi.variables.push(("PMIX_SECURITY_MODE".into(), "native".into()));
        }
    } else {
        // Munge knows who the client is, whatever it claims.
        mpi.directories
            .push((PathBuf::from("/run/munge"), "default: PMIx, for a client that claims to be root"));
        let modes = variable("PMIX_SECURITY_MODE").map(OsString::as_os_str);
        mpi.notes.extend(image.root_misfit(tree, &manager, &version, modes));
    }
    if let Some(modules) = variable("PMIX_GDS_MODULE")
        && let Some(first) = words(modules).next()
        && image.has_component("gds", first) == Some(false)
    {
        mpi.variables.push(("PMIX_GDS_MODULE".into(), "hash".into()));
    }
    if matches!(manager, Manager::Slurm) && compatible == Compatible::Pyxis {
        for (server, parameter) in PARAMETERS {
            let chosen = mpi.variables.iter().find(|(name, _)| name == server).map(|(_, value)| value);
            if let Some(value) = chosen.or(variable(server)).cloned() {
                mpi.variables.push((parameter.into(), value));
            }
        }
    }
    mpi.notes.extend(image.misfit(&manager, &version));
    mpi.notes.extend(image.newer_than_mpirun(tree, variable));
    mpi.directories.retain(|(directory, _)| fs_server::is_directory(directory));
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
    let conf = host.slurm_conf();
    let in_conf = conf.as_ref().and_then(|conf| conf.value("TmpFS")).map(PathBuf::from);
    let places = [variable("SLURM_PMIX_TMPDIR").map(PathBuf::from), in_conf];
    places
        .into_iter()
        .flatten()
        .map(|place| place.join(&name))
        .find(|directory| fs_server::is_directory(directory))
}

/// The MPI and PMIx libraries of an image, by their files' names.
struct Libraries {
    /// Components of PMIx; empty where it has them built in.
    pmix_components: Vec<String>,
    /// Components of Open MPI that talk to PMIx, with their directory.
    openmpi_components: Vec<PathBuf>,
    openmpi: Option<PathBuf>,
    mpich: Option<PathBuf>,
    pmix: Option<PathBuf>,
}

/// Open MPI's library, of all releases since 2.0, and MPICH's.
const OPENMPI: [&str; 2] = ["libmpi.so.40", "libmpi.so.20"];
const MPICH: [&str; 1] = ["libmpich.so.12"];

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
            openmpi: None,
            mpich: None,
            pmix: None,
        };
        for directory in directories {
            for below in ["pmix", "pmix2/lib/pmix"] {
                for prefix in ["mca_", "pmix_mca_"] {
                    found.pmix_components.extend(files(tree, &directory.join(below), prefix));
                }
            }
            for below in ["openmpi", "openmpi/lib/openmpi", "openmpi/lib/openmpi3"] {
                let directory = directory.join(below);
                let components = files(tree, &directory, "mca_pmix_");
                found.openmpi_components.extend(components.into_iter().map(|name| directory.join(name)));
            }
            for below in ["", "pmix2/lib"] {
                let library = directory.join(below).join("libpmix.so.2");
                if exists(tree, &library) {
                    found.pmix.get_or_insert(library);
                }
            }
            let first = |below: &str, names: &[&str]| {
                let places = [directory.clone(), directory.join(below)].into_iter();
                let mut files = places.flat_map(|place| names.iter().map(move |name| place.join(name)));
                files.find(|library| exists(tree, library))
            };
            found.openmpi = found.openmpi.or_else(|| first("openmpi/lib", &OPENMPI));
            found.mpich = found.mpich.or_else(|| first("mpich/lib", &MPICH));
        }
        found
    }

    /// Whether the image's PMIx has this component; none where it has no components of this kind in files.
    fn has_component(&self, kind: &str, name: &str) -> Option<bool> {
        let prefix = format!("mca_{kind}_");
        let names = self.pmix_components.iter().map(|file| file.strip_prefix("pmix_").unwrap_or(file));
        let mut of_kind = names.filter_map(|file| file.strip_prefix(&prefix)?.strip_suffix(".so")).peekable();
        of_kind.peek()?;
        Some(of_kind.any(|component| component == name))
    }

    /// Why the server would refuse ranks that are root inside: it knows them by their user id, which is another one there,
    /// or by munge, and the image's PMIx must have that too.
    fn root_misfit(
        &self,
        tree: &dyn Tree,
        manager: &Manager,
        server: &str,
        modes: Option<&OsStr>,
    ) -> Option<String> {
        let (pmix, option) = manager.names();
        let embedded = self.openmpi_components.iter().filter(|path| speaks_pmix(&file_name(path)));
        let clients: Vec<&PathBuf> = embedded.chain(&self.pmix).collect();
        let client = clients.last()?.display();
        let remedy = format!("MPI programs will fail; run them without {option}");
        let modes = modes.unwrap_or_default().to_string_lossy();
        if !modes.split(',').any(|mode| mode == "munge") {
            return Some(format!(
                "{pmix} {server} knows ranks by their user id alone ({modes}), not by munge, and inside you are root: \
                 {remedy}"
            ));
        }
        let has_munge = self.has_component("psec", "munge").unwrap_or_else(|| {
            // Built into a library, which then needs munge's.
            clients.iter().any(|path| needs_munge(tree, path))
        });
        (!has_munge).then(|| {
            format!(
                "{pmix} {server} takes ranks that are root inside by munge alone ({modes}), and the image's PMIx \
                 ({client}) has no munge component: {remedy}, or with an image whose PMIx has it"
            )
        })
    }

    /// Why ranks would not find each other.
    fn misfit(&self, manager: &Manager, server: &str) -> Option<String> {
        let first = |path: &&PathBuf| file_name(path).starts_with("mca_pmix_pmix1");
        if let Some(old) = self.openmpi_components.iter().find(first)
            && self.openmpi_components.iter().all(|path| first(&path) || !speaks_pmix(&file_name(path)))
        {
            let digits =
                file_name(old).trim_start_matches("mca_pmix_pmix").trim_end_matches(".so").to_owned();
            let version: Vec<String> = digits.chars().map(String::from).collect();
            return Some(format!(
                "the image's Open MPI has PMIx {} ({}), which cannot talk to {} {server}",
                version.join("."),
                old.display(),
                manager.names().0,
            ));
        }
        let mpich =
            self.mpich.as_ref().filter(|_| self.pmix.is_none() && self.openmpi_components.is_empty())?;
        let mpich = mpich.display();
        Some(match manager {
            Manager::OpenMpi | Manager::Hydra => format!(
                "mpirun is Open MPI's, and the image has MPICH ({mpich}): every rank will be alone; use MPICH's mpiexec, or \
                 an image with Open MPI"
            ),
            Manager::Slurm => format!(
                "the image's MPICH ({mpich}) speaks PMI, and not PMIx as Slurm does here; use --mpi=pmi2"
            ),
        })
    }

    /// Ranks of Open MPI 5 under an mpirun of release 4 that is on none of their nodes never return from their first exchange
    /// with another node. (Seen with 5.0.7 and 4.1.4; without shared memory, `btl=self,tcp`, they do.)
    fn newer_than_mpirun<'a>(
        &self,
        tree: &dyn Tree,
        variable: impl Fn(&str) -> Option<&'a OsString>,
    ) -> Option<String> {
        // Where mpirun and the daemon of this node listen: release 5 has other variables.
        let elsewhere = variable("OMPI_MCA_orte_hnp_uri")? != variable("OMPI_MCA_orte_local_daemon_uri")?;
        let is_first_node = variable("OMPI_COMM_WORLD_RANK") == variable("OMPI_COMM_WORLD_LOCAL_RANK");
        let several = variable("OMPI_COMM_WORLD_SIZE") != variable("OMPI_COMM_WORLD_LOCAL_SIZE");
        let library = resolve(tree, self.openmpi.as_ref()?).ok()?.path;
        (elsewhere && is_first_node && several && is_release_5(&file_name(&library))).then(|| {
            format!(
                "mpirun is of Open MPI 4 and not on the first node of the job, and the image has Open MPI 5 ({}): its ranks may \
                 wait for ever; start mpirun in a batch script",
                library.display()
            )
        })
    }

    /// The same where MPICH's mpiexec has started them.
    fn misfit_to_hydra(&self) -> Option<String> {
        let openmpi = self.openmpi.as_ref().filter(|_| self.mpich.is_none())?.display();
        Some(format!(
            "mpiexec is MPICH's, and the image has Open MPI ({openmpi}): every rank will be alone; use Open MPI's mpirun, or \
             an image with MPICH"
        ))
    }
}

/// libmpi.so.40.20.x is of Open MPI 4.0, 40.30.x of 4.1, 40.40.x of 5.0.
fn is_release_5(library: &str) -> bool {
    let revision =
        library.strip_prefix("libmpi.so.40.").and_then(|rest| rest.split('.').next()?.parse().ok());
    revision.is_some_and(|revision: u32| revision >= 40)
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn needs_munge(tree: &dyn Tree, library: &Path) -> bool {
    let read = || Library::read(tree.open(&resolve(tree, library).ok()?.path).ok()?.as_ref()).ok()?;
    read().is_some_and(|library| library.needed.iter().any(|needed| needed.starts_with("libmunge.so")))
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
    let listed =
        tree.list(&found.path).or_debug("a directory of the image's MPI is not listed").unwrap_or_default();
    let names = listed.into_iter().filter(|(name, _)| name.as_bytes().starts_with(prefix.as_bytes()));
    names.filter_map(|(name, _)| name.into_string().ok()).collect()
}
