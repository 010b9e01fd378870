//! What the hooks of a specification do, done by mizzen itself. A hook is a program of the host that a runtime starts as
//! root in the container's mounts; mizzen starts none: it has no root, and what the standard ones do is little.

use std::path::PathBuf;

use mizzen_core::Failure;

use super::spec::Hook;

/// What a hook does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Makes a symbolic link.
    Link {
        /// Absolute inside.
        link: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// Has the loader find the libraries in a directory.
    Libraries(PathBuf),
    /// Lets the CUDA libraries of an image win that are newer than this driver.
    CudaCompatibility {
        /// The version of the node's driver.
        driver: String,
    },
}

/// The programs of NVIDIA's toolkit that have the standard hooks.
const TOOLKIT: [&str; 2] = ["nvidia-cdi-hook", "nvidia-ctk"];

/// Hooks that a container of mizzen does not need: its directories below /dev have the right mode, and there nobody can
/// make device nodes in any case.
const NEEDLESS: [&str; 3] = ["chmod", "disable-device-node-modification", "update-nvidia-params"];

/// What a hook does; none if the site says that it can be left out.
pub fn effects(hook: &Hook, left_out: &[String]) -> Result<Vec<Effect>, Failure> {
    let program = hook.path.to_string_lossy();
    let name = hook.path.file_name().unwrap_or_default().to_string_lossy();
    // NVIDIA's installer wraps its programs in scripts, beside which lies NAME.real.
    let of_toolkit = TOOLKIT.contains(&name.trim_end_matches(".real"));
    let mut words = hook.args.iter().skip(1).skip_while(|word| word.starts_with('-') || *word == "hook");
    let command = words.next().map(String::as_str).filter(|_| of_toolkit);
    if left_out.iter().any(|known| *known == program || Some(known.as_str()) == command) {
        return Ok(Vec::new());
    }
    let named = |what: &str| Failure::new(format!("hook {program}: {what}"));
    let Some(command) = command else {
        return Err(named("mizzen does not know what it does, and runs no programs for a specification")
            .hint("if the devices work without it, name it in mizzen.toml: cdi_leave_out_hooks"));
    };
    let words: Vec<&str> = words.map(String::as_str).collect();
    let flags =
        flags(&words).ok_or_else(|| named(&format!("{command}: its arguments are not --NAME VALUE")))?;
    let values =
        |name: &'static str| flags.iter().filter(move |(flag, _)| *flag == name).map(|(_, value)| *value);
    match command {
        "create-symlinks" => values("link")
            .flat_map(|value| value.split(','))
            .map(|value| {
                let absolute =
                    |link: &&str| link.starts_with('/') && !link.split('/').any(|part| part == "..");
                match value.split_once("::").filter(|(target, link)| !target.is_empty() && absolute(link)) {
                    Some((target, link)) => Ok(Effect::Link { link: link.into(), target: target.into() }),
                    None => Err(named(&format!("create-symlinks: {value:?} is not TARGET::/LINK"))),
                }
            })
            .collect(),
        "update-ldcache" | "create-soname-symlinks" => values("folder")
            .flat_map(|value| value.split(','))
            .map(|folder| match folder.starts_with('/') {
                true => Ok(Effect::Libraries(folder.into())),
                false => Err(named(&format!("{command}: {folder:?} is not an absolute path"))),
            })
            .collect(),
        "enable-cuda-compat" | "cuda-compat" => {
            let driver = values("host-driver-version").next();
            Ok(driver
                .map(|driver| Effect::CudaCompatibility { driver: driver.to_owned() })
                .into_iter()
                .collect())
        }
        needless if NEEDLESS.contains(&needless) => Ok(Vec::new()),
        unknown => Err(named(&format!("mizzen does not know the hook {unknown:?}"))
            .hint("if the devices work without it, name it in mizzen.toml: cdi_leave_out_hooks")),
    }
}

/// `--NAME VALUE` and `--NAME=VALUE`.
fn flags<'a>(words: &[&'a str]) -> Option<Vec<(&'a str, &'a str)>> {
    let mut words = words.iter().copied();
    let mut flags = Vec::new();
    while let Some(word) = words.next() {
        let flag = word.strip_prefix("--").or(word.strip_prefix('-'))?;
        flags.push(match flag.split_once('=') {
            Some(pair) => pair,
            None => (flag, words.next()?),
        });
    }
    Some(flags)
}
