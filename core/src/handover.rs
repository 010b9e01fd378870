//! What the plugin hands to the launcher when a task is about to start: who in the step this task is, and over which
//! descriptors it meets the others. It travels in one variable of the task, which the program never sees.
//!
//! A user can put anything there, and reaches nothing by it: the launcher that reads it is the user's own process.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::config::Source;
use crate::failure::quote;
use crate::{Failure, pairs};

/// The variable. The prefix lets it pass where Slurm filters a task's environment.
pub const VARIABLE: &str = "SLURM_MIZZEN_HANDOVER";
/// Slurm drops a variable of 128 KiB, its name included, and says that all is well.
const LIMIT: usize = (128 << 10) - 64;

/// The task, as the plugin knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The node's name in messages.
    pub node: String,
    /// `JOB.STEP`; STEP is a number, `batch` or `interactive`.
    pub step: String,
    /// mizzen.toml.
    pub config: Source,
    /// The descriptor from which the first task's one message is read, over and over, by all others.
    pub receive: i32,
    /// The descriptor on which the message is sent; and from which whoever fails first takes the one byte that gives the right
    /// to report.
    pub send: i32,
    /// The descriptor of the [`crate::StepReport`].
    pub report: i32,
    /// The step's other nodes, if it has any.
    pub other_nodes: Option<OtherNodes>,
    /// What this task does for its step.
    pub role: Role,
    /// The program's name, where Slurm's own place for it is taken by the launcher's.
    pub program: Option<OsString>,
}

/// What it takes to end a step on its other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherNodes {
    /// Slurm's command.
    pub scancel: PathBuf,
    /// Which of the step's nodes this one is.
    pub index: u32,
}

/// The first task of a step on a node makes the container, all others enter it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Make it, and enter.
    Builder {
        /// The descriptor of the user namespace in which all groups of the user are known; None where the launcher shall
        /// make one, in which the primary group alone is.
        user_namespace: Option<i32>,
        /// The user's lines in the node's passwd and group files, from whatever service has them.
        accounts: Accounts,
        /// Whether nobody else is to enter.
        alone: bool,
    },
    /// Wait for the builder, and enter.
    Member {
        /// The builder's process.
        builder: i32,
    },
}

/// The user as the node's name services know them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    /// The login name.
    pub user: Option<String>,
    /// The home directory.
    pub home: Option<PathBuf>,
    /// The login shell.
    pub shell: Option<PathBuf>,
    /// All groups by number, the primary one first, with their names where they have one.
    pub groups: Vec<(u32, String)>,
}

impl Handover {
    /// Text for [`VARIABLE`]. Names of groups are for people alone, and are left out where there is no room for them.
    pub fn encode(&self) -> Result<String, Failure> {
        let fitting =
            [true, false].into_iter().map(|names| self.text(names)).find(|text| text.len() <= LIMIT);
        fitting.ok_or_else(|| {
            let count = match &self.role {
                Role::Builder { accounts, .. } => accounts.groups.len(),
                Role::Member { .. } => 0,
            };
            Failure::new(format!("too much for the variable {VARIABLE}, with {count} groups of the user's"))
                .hint("ask an administrator for an account in fewer groups; `id -G | wc -w` counts them")
        })
    }

    fn text(&self, group_names: bool) -> String {
        let number = |number: i32| number.to_string().into_bytes();
        let mut pairs = vec![
            ("node", self.node.clone().into_bytes()),
            ("step", self.step.clone().into_bytes()),
            ("receive", number(self.receive)),
            ("send", number(self.send)),
            ("report", number(self.report)),
        ];
        if let Some(OtherNodes { scancel, index }) = &self.other_nodes {
            pairs.push(("scancel", scancel.as_os_str().as_bytes().to_vec()));
            pairs.push(("index", index.to_string().into_bytes()));
        }
        if let Source::Named(path) = &self.config {
            pairs.push(("config", path.as_os_str().as_bytes().to_vec()));
        }
        if let Some(program) = &self.program {
            pairs.push(("program", program.as_bytes().to_vec()));
        }
        match &self.role {
            Role::Member { builder } => pairs.push(("builder", number(*builder))),
            Role::Builder { user_namespace, accounts, alone } => {
                pairs.extend(user_namespace.map(|namespace| ("user-namespace", number(namespace))));
                pairs.extend(alone.then(|| ("alone", Vec::new())));
                let path = |path: &PathBuf| path.as_os_str().as_bytes().to_vec();
                pairs.extend(accounts.user.as_ref().map(|user| ("user", user.clone().into_bytes())));
                pairs.extend(accounts.home.as_ref().map(|home| ("home", path(home))));
                pairs.extend(accounts.shell.as_ref().map(|shell| ("shell", path(shell))));
                let groups = accounts.groups.iter().map(|(gid, name)| match group_names {
                    true => format!("{gid}:{name}"),
                    false => format!("{gid}:"),
                });
                pairs.push(("groups", groups.collect::<Vec<_>>().join("\n").into_bytes()));
            }
        }
        pairs::encode(pairs)
    }

    /// Reads the variable back.
    pub fn decode(text: &[u8]) -> Result<Handover, Failure> {
        read(&pairs::decode(text).map_err(about)?).map_err(about)
    }
}

fn about(failure: Failure) -> Failure {
    failure.about(VARIABLE).hint("plugin and launcher must be of the same version on every node")
}

fn read(pairs: &[(String, Vec<u8>)]) -> Result<Handover, Failure> {
    let find = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let need = |name: &str| find(name).ok_or_else(|| Failure::new(format!("no {name}")));
    let text = |value: Vec<u8>| String::from_utf8_lossy(&value).into_owned();
    let path = |value: Vec<u8>| PathBuf::from(OsString::from_vec(value));
    let number = |value: Vec<u8>| {
        let bad = || Failure::new(format!("\"{}\" is not a number", quote(&value)));
        std::str::from_utf8(&value).ok().and_then(|text| text.parse::<i32>().ok()).ok_or_else(bad)
    };
    let role = match find("builder") {
        Some(builder) => Role::Member { builder: number(builder)? },
        None => Role::Builder {
            user_namespace: find("user-namespace").map(number).transpose()?,
            accounts: Accounts {
                user: find("user").map(text),
                home: find("home").map(path),
                shell: find("shell").map(path),
                groups: find("groups").map(text).map(|list| read_groups(&list)).unwrap_or_default(),
            },
            alone: find("alone").is_some(),
        },
    };
    let other_nodes = match find("scancel").map(path) {
        Some(scancel) => {
            let index = u32::try_from(number(need("index")?)?).unwrap_or_default();
            Some(OtherNodes { scancel, index })
        }
        None => None,
    };
    Ok(Handover {
        node: text(need("node")?),
        step: text(need("step")?),
        config: find("config").map_or(Source::Default, |file| Source::Named(path(file))),
        receive: number(need("receive")?)?,
        send: number(need("send")?)?,
        report: number(need("report")?)?,
        other_nodes,
        role,
        program: find("program").map(OsString::from_vec),
    })
}

fn read_groups(list: &str) -> Vec<(u32, String)> {
    let pairs = list.lines().filter_map(|line| line.split_once(':'));
    pairs.filter_map(|(gid, name)| Some((gid.parse().ok()?, name.to_owned()))).collect()
}

/// No message to the tasks is longer.
pub const OUTCOME_LIMIT: usize = 4096;

/// How building the container went: the text of the one message that the first task leaves for the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The container is there.
    Ready,
    /// It is not, and why.
    Failed(Failure),
}

impl Outcome {
    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Outcome::Ready => b"+".to_vec(),
            Outcome::Failed(why) => {
                b"-".iter().copied().chain(why.encode().bytes()).take(OUTCOME_LIMIT).collect()
            }
        }
    }

    /// Reads a message, which is a user's text.
    pub fn decode(bytes: &[u8]) -> Outcome {
        match bytes.split_first() {
            Some((b'+', _)) => Outcome::Ready,
            Some((_, why)) => Outcome::Failed(Failure::decode(why, OUTCOME_LIMIT)),
            None => Outcome::Failed(Failure::decode(b"", OUTCOME_LIMIT)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handover_survives_the_variable() {
        let accounts = Accounts {
            user: Some("alice".to_owned()),
            home: Some("/home/a b".into()),
            shell: None,
            groups: vec![(2001, "alice".to_owned()), (2100, String::new())],
        };
        let member = Handover {
            node: "node1".to_owned(),
            step: "7.batch".to_owned(),
            config: Source::Named("/etc/m.toml".into()),
            receive: 5,
            send: 6,
            report: 7,
            other_nodes: Some(OtherNodes { scancel: "/usr/bin/scancel".into(), index: 3 }),
            role: Role::Member { builder: 77 },
            program: Some("./a=b".into()),
        };
        let role = Role::Builder { user_namespace: Some(9), accounts, alone: true };
        let builder =
            Handover { role, config: Source::Default, program: None, other_nodes: None, ..member.clone() };
        for handover in [member, builder] {
            assert_eq!(Handover::decode(handover.encode().unwrap().as_bytes()), Ok(handover));
        }
    }

    #[test]
    fn too_many_groups_lose_their_names_and_then_are_refused() {
        let with_groups = |count: u32| {
            let groups = (0..count).map(|number| (100_000 + number, "n".repeat(60))).collect();
            let accounts = Accounts { groups, ..Accounts::default() };
            Handover {
                node: "node1".to_owned(),
                step: "7.0".to_owned(),
                config: Source::Default,
                receive: 5,
                send: 6,
                report: 7,
                other_nodes: None,
                role: Role::Builder { user_namespace: None, accounts, alone: true },
                program: None,
            }
        };
        let text = with_groups(3000).encode().unwrap();
        assert!(text.len() < 128 << 10 && !text.contains("nnn"));
        let Role::Builder { accounts, .. } = Handover::decode(text.as_bytes()).unwrap().role else {
            panic!()
        };
        assert_eq!((accounts.groups.len(), &accounts.groups[7]), (3000, &(100_007, String::new())));
        let failure = with_groups(60_000).encode().unwrap_err();
        assert!(failure.message.ends_with("with 60000 groups of the user's"), "{failure}");
    }

    #[test]
    fn an_outcome_survives_its_message_and_is_harmless() {
        let failure = Failure::new("no such image").about("node1").hint("try another");
        for outcome in [Outcome::Ready, Outcome::Failed(failure)] {
            assert_eq!(Outcome::decode(&outcome.encode()), outcome);
        }
        let message = |bytes: &[u8]| match Outcome::decode(bytes) {
            Outcome::Failed(why) => why.message,
            Outcome::Ready => String::new(),
        };
        assert_eq!(message(b""), "");
        assert_eq!(message(b"-125\n\na\x1b"), "a\\u{1b}");
        assert_eq!(Outcome::Failed(Failure::new("x".repeat(9000))).encode().len(), OUTCOME_LIMIT);
    }

    #[test]
    fn a_broken_one_is_refused() {
        for text in ["", "node=n", "node=n&step=1.0&receive=x&send=4&report=5"] {
            let failure = Handover::decode(text.as_bytes()).unwrap_err();
            assert!(failure.message.starts_with(VARIABLE) && failure.hint.is_some(), "{failure:?}");
        }
    }
}
