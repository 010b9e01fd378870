//! The environment on its way from a program in the container to Slurm's commands on the host, and through them to
//! the programs of a new step.
//!
//! The user's own variables go all the way. Those that name files of one side stay on their side: the image's
//! LD_LIBRARY_PATH breaks the host's srun. The host's commands get the host's values instead. The inside ones are
//! packed into one variable that any node unpacks when the new step runs in the same image; a prefix SLURM_ lets it
//! pass `--export=NONE`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use mizzen_core::Request;
use mizzen_core::escape::{escape, unescape};
use mizzen_core::request;

use super::HOST_VARIABLE;
use crate::variable_rules;

/// Carries what belongs to the inside through the host.
pub const VARIABLE: &str = "SLURM_MIZZEN_INSIDE";

/// The commands that start something which may run in the container again.
const LAUNCHERS: [&str; 3] = ["srun", "sbatch", "salloc"];

/// Further variables of one side, beside those that a container never takes from the host; a name that ends in `*` stands for all
/// that begin so. A site's srun may be a script, and the image's modules are none for the host's interpreters and shells. Slurm's
/// configuration names plugins that its commands load, plugins of Slurm's are in Lua, scrontab starts an editor, salloc starts a shell, and
/// --x11 has xauth write a file. In the home directory
/// and that of settings they look for what decides what is run, and one that the caller has made up may be another user's directory outside.
const ONE_SIDED: [&str; 45] = [
    "HOME",
    "SHELL",
    "ZDOTDIR",
    "FPATH",
    "HISTFILE",
    "XAUTHORITY",
    "XDG_*",
    "LMOD_*",
    "MODULE*",
    "LOADEDMODULES",
    "_LMFILES_*",
    "_ModuleTable*",
    "EDITOR",
    "VISUAL",
    "PAGER",
    "LESS*",
    "SLURM_CONF",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONUSERBASE",
    "PYTHONEXECUTABLE",
    "PYTHONPYCACHEPREFIX",
    "PYTHONPLATLIBDIR",
    "PYTHONBREAKPOINT",
    "PERL*",
    "RUBY*",
    "GEM_*",
    "BUNDLE_*",
    "LUA_*",
    "NODE_PATH",
    "NODE_OPTIONS",
    "TCL*",
    "SHELLOPTS",
    "BASHOPTS",
    "PS4",
    "CDPATH",
    "NLSPATH",
    "TERMINFO",
    "TERMINFO_DIRS",
    "TZDIR",
    "HOSTALIASES",
    "OPENSSL_*",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "INPUTRC",
];

/// scrontab has the table that is edited in a file there, and takes what it finds in it then. Programs of a new step keep theirs.
const SCRONTABS: &str = "TMPDIR";

/// The kernel takes no variable longer than 128 KiB; this leaves room for its name and for others' habits.
const LIMIT: usize = 120_000;

type Variables = Vec<(OsString, OsString)>;

/// What a program inside had when it called srun, sbatch or salloc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallerContext {
    /// The image that it ran in, by its path or its name in a registry; everything else means something in that one only.
    pub image: OsString,
    /// Its working directory.
    pub workdir: PathBuf,
    /// Its variables that name files of the image. Empty if the user wants no variables exported.
    pub variables: Variables,
    /// What it called.
    command: OsString,
}

impl CallerContext {
    /// Reads it back from the environment of a task on the node. A broken value is as good as none: only programs
    /// that change our variable make one, and it carries conveniences.
    pub fn from_environment(environment: &[(OsString, OsString)]) -> Option<CallerContext> {
        let value = |name: &str| environment.iter().find(|(known, _)| known == name).map(|(_, value)| value);
        let mut inside = CallerContext::decode(value(VARIABLE)?.as_bytes())?;
        // `--export=NONE` and lists. sbatch leaves a note and then gives the job the environment of a login; srun
        // leaves no note, and no PATH either.
        let exported = if inside.command == "sbatch" {
            value("SLURM_EXPORT_ENV").is_none_or(|list| exports_all(list))
        } else {
            value("PATH").is_some()
        };
        if !exported {
            inside.variables.clear();
        }
        Some(inside)
    }

    /// What a program has that calls a command now, if it is in a container that Slurm started.
    fn of_caller(
        command: &str,
        environment: &[(OsString, OsString)],
        workdir: &Path,
    ) -> Option<CallerContext> {
        let (_, request) = environment.iter().find(|(name, _)| name == request::VARIABLE)?;
        let Ok(Request::Container(container)) = Request::decode(request.as_bytes()) else { return None };
        let packed = |name: &OsStr| belongs_to_one_side(name) && name != "PWD" && name != "OLDPWD";
        let variables = environment.iter().filter(|(name, _)| packed(name)).cloned().collect();
        let workdir = workdir.to_owned();
        Some(CallerContext { image: container.image.name(), workdir, variables, command: command.into() })
    }

    /// Text for [`VARIABLE`], and the names of variables for which it has no room. The longest ones have none.
    fn encode(&self) -> (String, Vec<OsString>) {
        let path = |path: &Path| escape(path.as_os_str().as_bytes());
        let (image, workdir) = (escape(self.image.as_bytes()), path(&self.workdir));
        let command = escape(self.command.as_bytes());
        let mut text = format!("image={image}&workdir={workdir}&command={command}");
        let mut fields: Vec<(&OsStr, String)> = self
            .variables
            .iter()
            .map(|(name, value)| {
                let line = [name.as_bytes(), b"=", value.as_bytes()].concat();
                (name.as_os_str(), format!("&variable={}", escape(&line)))
            })
            .collect();
        fields.sort_by_key(|(_, field)| field.len());
        let mut left_out = Vec::new();
        for (name, field) in fields {
            if text.len() + field.len() <= LIMIT {
                text.push_str(&field);
            } else {
                left_out.push(name.to_owned());
            }
        }
        (text, left_out)
    }

    fn decode(text: &[u8]) -> Option<CallerContext> {
        let (mut image, mut workdir, mut command, mut variables) = (None, None, None, Vec::new());
        for pair in text.split(|byte| *byte == b'&') {
            let equals = pair.iter().position(|byte| *byte == b'=')?;
            let value = unescape(&pair[equals + 1..]).filter(|value| !value.contains(&0))?;
            let place = match &pair[..equals] {
                b"image" => &mut image,
                b"workdir" => &mut workdir,
                b"command" => &mut command,
                b"variable" => {
                    let equals = value.iter().position(|byte| *byte == b'=')?;
                    let name = OsString::from_vec(value[..equals].to_vec());
                    // Nothing else is restored, whoever wrote this.
                    if belongs_to_one_side(&name) {
                        variables.push((name, OsString::from_vec(value[equals + 1..].to_vec())));
                    }
                    continue;
                }
                _ => return None,
            };
            if place.replace(OsString::from_vec(value)).is_some() {
                return None;
            }
        }
        let absolute = |path: OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
        Some(CallerContext { image: image?, workdir: absolute(workdir?)?, variables, command: command? })
    }
}

/// Whether `--export` hands on the whole environment. Slurm reads its words in any case of letters.
fn exports_all(list: &OsStr) -> bool {
    list.as_bytes().split(|byte| *byte == b',').any(|word| word.eq_ignore_ascii_case(b"all"))
}

/// Whether the variable names files of the side it is set on.
pub fn belongs_to_one_side(name: &OsStr) -> bool {
    variable_rules::belongs_to_one_side(name)
        || ONE_SIDED.iter().any(|pattern| variable_rules::matches(pattern, name))
}

/// Whether the host's command has the host's value of it.
fn is_hosts(command: &OsStr, name: &OsStr) -> bool {
    belongs_to_one_side(name) || command == "scrontab" && name == SCRONTABS
}

/// Whether the variable is between this program and its helper.
fn is_ours(name: &OsStr) -> bool {
    name == HOST_VARIABLE || name == VARIABLE
}

/// The environment that leaves the container with a command (runs inside), and the names of variables that are too
/// long to come back in the new step.
pub fn leaving(command: &str, environment: Variables, workdir: &Path) -> (Variables, Vec<OsString>) {
    let inside =
        CallerContext::of_caller(command, &environment, workdir).filter(|_| LAUNCHERS.contains(&command));
    let stays = |name: &OsStr| is_hosts(command.as_ref(), name) || is_ours(name);
    let mut leaving: Variables = environment.into_iter().filter(|(name, _)| !stays(name)).collect();
    let mut left_out = Vec::new();
    if let Some(inside) = inside {
        let (text, too_long) = inside.encode();
        leaving.push((VARIABLE.into(), text.into()));
        left_out = too_long;
    }
    (leaving, left_out)
}

/// The environment of the real command (runs outside): what has left the container, with the host's own values
/// where a side has its own. The rule is applied again, because a shim of another make may send anything.
pub fn arriving(
    command: &OsStr,
    received: Variables,
    hosts: impl Iterator<Item = (OsString, OsString)>,
    cwd: &Path,
) -> Variables {
    let from_inside =
        received.into_iter().filter(|(name, _)| !is_hosts(command, name) && name != HOST_VARIABLE);
    let own = hosts.filter(|(name, _)| is_hosts(command, name) && name != "PWD" && name != "OLDPWD");
    from_inside.chain(own).chain([("PWD".into(), cwd.into())]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::wire::pairs;
    use super::*;

    fn of_script() -> Variables {
        pairs(&[
            ("PATH", "/opt/conda/bin:/bin"),
            ("LD_LIBRARY_PATH", "/opt/lib"),
            ("PYTHONPATH", "/opt/app"),
            ("BASH_FUNC_x%%", "() { echo 'a=b&c';\n}"),
            ("PWD", "/opt/app"),
            ("OMP_NUM_THREADS", "4"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_MIZZEN_REQUEST", "image=/shared/tf.sqsh"),
            ("SLURM_MIZZEN_HOST", "/.mizzen/helper"),
            ("SLURM_MIZZEN_INSIDE", "image=/old&workdir=/old"),
        ])
    }

    fn on_host() -> impl Iterator<Item = (OsString, OsString)> {
        pairs(&[("PATH", "/usr/bin"), ("PERL5LIB", "/site"), ("HOME", "/x"), ("PWD", "/spool")]).into_iter()
    }

    fn names(variables: &[(OsString, OsString)]) -> Vec<&str> {
        variables.iter().map(|(name, _)| name.to_str().unwrap()).collect()
    }

    #[test]
    fn what_belongs_inside_comes_back_inside() {
        let (leaving, left_out) = leaving("srun", of_script(), Path::new("/opt/app"));
        let outside = ["OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_MIZZEN_REQUEST", "SLURM_MIZZEN_INSIDE"];
        assert_eq!((names(&leaving), left_out), (outside.to_vec(), Vec::new()));
        let inside =
            CallerContext::from_environment(&arriving("srun".as_ref(), leaving, on_host(), Path::new("/")))
                .unwrap();
        assert_eq!((inside.image, inside.workdir), ("/shared/tf.sqsh".into(), "/opt/app".into()));
        let mut expected = of_script();
        expected.truncate(4);
        let mut variables = inside.variables;
        expected.sort();
        variables.sort();
        assert_eq!(variables, expected);
    }

    #[test]
    fn the_hosts_commands_get_the_hosts_values() {
        // Also when a shim sends what it should not.
        let command = arriving("srun".as_ref(), of_script(), on_host(), Path::new("/"));
        let expected = [
            ("OMP_NUM_THREADS", "4"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_MIZZEN_REQUEST", "image=/shared/tf.sqsh"),
            ("SLURM_MIZZEN_INSIDE", "image=/old&workdir=/old"),
            ("PATH", "/usr/bin"),
            ("PERL5LIB", "/site"),
            ("HOME", "/x"),
            ("PWD", "/"),
        ];
        assert_eq!(command, pairs(&expected));
    }

    #[test]
    fn an_editor_of_the_containers_is_not_started_outside() {
        let one_sided = ["EDITOR", "VISUAL", "PERLLIB", "LUA_PATH_5_4", "SHELLOPTS"];
        let of_shells = ["SHELL", "ZDOTDIR", "FPATH", "HISTFILE", "XDG_DATA_HOME", "XAUTHORITY"];
        let of_modules =
            ["LMOD_CMD", "MODULESHOME", "MODULES_CMD", "MODULEPATH", "_LMFILES_", "_ModuleTable001_"];
        let data = one_sided.into_iter().chain(of_shells).chain(of_modules).chain(["TMPDIR", "MINE"]);
        let inside: Vec<_> = data.map(|name| (name, "/data")).collect();
        for (command, left, outside) in [
            ("scrontab", vec!["MINE"], vec!["MINE", "EDITOR", "TMPDIR", "PWD"]),
            ("scontrol", vec!["TMPDIR", "MINE"], vec!["TMPDIR", "MINE", "EDITOR", "PWD"]),
        ] {
            let (leaving, _) = leaving(command, pairs(&inside), Path::new("/"));
            assert_eq!(names(&leaving), left, "{command}");
            let hosts = pairs(&[("EDITOR", "vi"), ("TMPDIR", "/tmp")]).into_iter();
            // Also from a shim of another make.
            let all = arriving(command.as_ref(), pairs(&inside), hosts, Path::new("/"));
            assert_eq!(names(&all), outside, "{command}");
            assert!(all.contains(&("EDITOR".into(), "vi".into())));
        }
    }

    #[test]
    fn only_what_starts_programs_carries_it_and_only_from_a_container() {
        let carries = |command: &str, variables: Variables| {
            names(&leaving(command, variables, Path::new("/")).0).contains(&VARIABLE)
        };
        for (command, expected) in [("srun", true), ("sbatch", true), ("salloc", true), ("squeue", false)] {
            assert_eq!(carries(command, of_script()), expected, "{command}");
        }
        for request in ["none", "oci", "nonsense"] {
            assert!(!carries("srun", pairs(&[("PATH", "/bin"), (request::VARIABLE, request)])), "{request}");
        }
    }

    #[test]
    fn export_none_is_respected() {
        let count = |command: &str, more: &[(&str, &str)]| {
            let (mut variables, _) = leaving(command, of_script(), Path::new("/opt/app"));
            variables.extend(pairs(more));
            let inside = CallerContext::from_environment(&variables).unwrap();
            assert_eq!(inside.workdir, Path::new("/opt/app"));
            inside.variables.len()
        };
        let path = ("PATH", "/usr/bin");
        assert_eq!((count("srun", &[path]), count("srun", &[])), (4, 0), "srun --export=NONE leaves no PATH");
        assert_eq!(
            count("srun", &[path, ("SLURM_EXPORT_ENV", "NONE")]),
            4,
            "srun --export=ALL in such a job"
        );
        for (list, expected) in [("ALL", 4), ("all,X=1", 4), ("NONE", 0), ("NIL", 0), ("HOME,X=1", 0)] {
            assert_eq!(count("sbatch", &[path, ("SLURM_EXPORT_ENV", list)]), expected, "{list}");
        }
        assert_eq!(count("sbatch", &[path]), 4);
    }

    #[test]
    fn hostile_bytes_survive_or_are_refused() {
        let wild = OsString::from_vec((1..=255).collect());
        let inside = CallerContext {
            image: wild.clone(),
            workdir: Path::new("/").join(&wild),
            variables: vec![("PATH".into(), wild), ("LD_=".into(), "".into())],
            command: "srun".into(),
        };
        let (text, _) = inside.encode();
        assert!(text.bytes().all(|byte| byte.is_ascii_graphic()), "{text}");
        let back = CallerContext::decode(text.as_bytes()).unwrap();
        assert_eq!((&back.image, &back.workdir), (&inside.image, &inside.workdir));
        assert!(back.variables.contains(&inside.variables[0]));
        for text in [
            "",
            "image=/a",
            "workdir=/a",
            "image=/a&workdir=/b",
            "image=/a&workdir=b&command=srun",
            "image=/a&image=/b&workdir=/&command=srun",
            "image=/a&workdir=/b&command=srun&other=1",
            "image=/a&workdir=/b&command=srun&variable=PATH",
            "image=/a&workdir=/b&command=srun&variable=PATH%3Da%00b",
            "image=/a%0&workdir=/b&command=srun",
            "image=/a&workdir=/b&command=srun&",
        ] {
            assert_eq!(CallerContext::decode(text.as_bytes()), None, "{text}");
        }
        let forged = b"image=/a&workdir=/b&command=srun&variable=USER%3D/evil&variable=PATH%3D/x";
        assert_eq!(CallerContext::decode(forged).unwrap().variables, pairs(&[("PATH", "/x")]));
    }

    #[test]
    fn the_longest_are_left_out_when_there_is_no_room() {
        let long = "/a:".repeat(50_000);
        let variables = pairs(&[("LD_PRELOAD", long.as_str()), ("PATH", "/bin"), ("ENV", &long[..90_000])]);
        let inside =
            CallerContext { image: "/i".into(), workdir: "/".into(), variables, command: "srun".into() };
        let (text, left_out) = inside.encode();
        assert!(text.len() <= LIMIT);
        assert_eq!(left_out, ["LD_PRELOAD"]);
        assert_eq!(CallerContext::decode(text.as_bytes()).unwrap().variables.len(), 2);
    }
}
