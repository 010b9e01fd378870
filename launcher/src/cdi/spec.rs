//! A CDI specification file as it is written (github.com/cncf-tags/container-device-interface, SPEC.md), and what makes
//! it a valid one. A field that is not known may be one without which the device does not work: it is refused.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use mizzen_core::Failure;
use mizzen_core::device::{is_device_kind, is_device_name};
use serde::Deserialize;

/// The newest version of CDI that is understood, and the minor versions that there have been.
const NEWEST: Version = Version(1, 1);
const RELEASED: [Version; 10] = [
    Version(0, 1),
    Version(0, 2),
    Version(0, 3),
    Version(0, 4),
    Version(0, 5),
    Version(0, 6),
    Version(0, 7),
    Version(0, 8),
    Version(1, 0),
    NEWEST,
];

/// Major and minor; a patch level changes nothing in the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}.{}.0", self.0, self.1)
    }
}

/// One file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Spec {
    cdi_version: String,
    /// `vendor.com/class`.
    pub kind: String,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    /// What can be asked for.
    pub devices: Vec<Device>,
    /// What each of them needs beside its own edits.
    #[serde(default)]
    pub container_edits: ContainerEdits,
}

/// A device of a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Device {
    /// Unique among those of its kind.
    pub name: String,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    /// What it changes in a container.
    pub container_edits: ContainerEdits,
}

/// What is changed in a container.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct ContainerEdits {
    /// `NAME=VALUE`.
    pub env: Vec<String>,
    /// Devices below /dev.
    pub device_nodes: Vec<DeviceNode>,
    /// Files and directories.
    pub mounts: Vec<Mount>,
    /// Programs of the host that a runtime would start.
    pub hooks: Vec<Hook>,
    /// Groups of the program.
    pub additional_gids: Vec<u32>,
    /// Shares of the processor's cache and memory bandwidth.
    pub intel_rdt: Option<IntelRdt>,
    /// Network interfaces.
    pub net_devices: Vec<NetDevice>,
}

/// A device node.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct DeviceNode {
    /// Inside, and on the host if `host_path` does not say otherwise.
    pub path: PathBuf,
    /// On the host.
    pub host_path: Option<PathBuf>,
    /// `b`, `c`, `u` or `p`.
    #[serde(default, rename = "type")]
    pub kind: String,
    /// The numbers that the node must have.
    pub major: Option<i64>,
    /// The numbers that the node must have.
    pub minor: Option<i64>,
    #[serde(rename = "fileMode")]
    _file_mode: Option<u32>,
    #[serde(default)]
    permissions: String,
    #[serde(rename = "uid")]
    _uid: Option<u32>,
    #[serde(rename = "gid")]
    _gid: Option<u32>,
}

/// A mount.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Mount {
    /// On the host.
    pub host_path: PathBuf,
    /// Inside.
    pub container_path: PathBuf,
    /// As for `mount -o`.
    #[serde(default)]
    pub options: Vec<String>,
    /// The type of the file system; empty or `bind` for a bind mount.
    #[serde(default, rename = "type")]
    pub kind: String,
}

/// A program that a runtime would start.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Hook {
    hook_name: String,
    /// The program.
    pub path: PathBuf,
    /// Its name and arguments.
    #[serde(default)]
    pub args: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
    #[serde(rename = "timeout")]
    _timeout: Option<u64>,
}

/// Shares of the processor's cache and memory bandwidth.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntelRdt {
    #[serde(rename = "closID")]
    _clos_id: Option<String>,
    #[serde(rename = "l3CacheSchema")]
    _l3_cache_schema: Option<String>,
    #[serde(rename = "memBwSchema")]
    _memory_bandwidth_schema: Option<String>,
    #[serde(rename = "enableCMT")]
    _enable_cmt: Option<bool>,
    #[serde(rename = "enableMBM")]
    _enable_mbm: Option<bool>,
    schemata: Option<Vec<String>>,
    #[serde(rename = "enableMonitoring")]
    enable_monitoring: Option<bool>,
}

/// A network interface.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NetDevice {
    /// Its name on the host.
    pub host_interface_name: String,
    /// Its name inside.
    pub name: String,
}

/// A specification has a handful of levels.
const DEPTH_LIMIT: usize = 64;

/// Refuses what would take the parser for ever. For each token it looks at all lists and mappings in brackets that are
/// open, so the time grows with the square of their depth. (What is nested by indentation it refuses itself, in time.) And
/// a few aliases of aliases stand for more than there is memory; no tool writes any.
fn check_shape(text: &str) -> Result<(), Failure> {
    let (mut depth, mut quote) = (0_usize, None);
    // The last byte, and the last one that is no blank.
    let (mut last, mut before) = (b'\n', b'\n');
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let begins_value = b"\n,:[{-?".contains(&before);
        match (quote, byte) {
            (Some(b'"'), b'\\') => _ = bytes.next(),
            (Some(open), _) if open == byte => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') if begins_value => quote = Some(byte),
            (None, b'[' | b'{') => depth += 1,
            (None, b']' | b'}') => depth = depth.saturating_sub(1),
            (None, b'*') if begins_value && (last.is_ascii_whitespace() || b"[{,".contains(&last)) => {
                return Err(Failure::new("it repeats a part of itself by an alias, as *name")
                    .hint("write out what the alias stands for"));
            }
            (None, _) => {}
        }
        if depth > DEPTH_LIMIT {
            return Err(Failure::new(format!("it is nested more than {DEPTH_LIMIT} levels deep")));
        }
        last = byte;
        if byte == b'\n' || !byte.is_ascii_whitespace() {
            before = byte;
        }
    }
    Ok(())
}

impl Spec {
    /// Reads a file's text. JSON is YAML, too.
    pub fn parse(text: &str) -> Result<Spec, Failure> {
        check_shape(text)?;
        let spec: Spec = yaml_serde::from_str(text).map_err(|error| {
            // A newer version would explain an unknown field: the version is told first.
            let newer =
                yaml_serde::from_str(text).ok().and_then(|head: Head| version(&head.cdi_version).err());
            newer.unwrap_or_else(|| Failure::new(error.to_string().lines().collect::<Vec<_>>().join(" ")))
        })?;
        spec.check()?;
        Ok(spec)
    }

    /// What only the values themselves can show.
    fn check(&self) -> Result<(), Failure> {
        let version = version(&self.cdi_version)?;
        if !is_device_kind(&self.kind) {
            let message = format!("{:?} is not a kind of devices like \"vendor.com/class\"", self.kind);
            return Err(Failure::new(message));
        }
        if self.devices.is_empty() {
            return Err(Failure::new("it has no devices"));
        }
        let mut needed = self.container_edits.needs();
        self.container_edits.check()?;
        let annotated = !self.annotations.is_empty();
        if annotated || self.devices.iter().any(|device| !device.annotations.is_empty()) {
            needed.push((Version(0, 6), "annotations"));
        }
        if self.kind.split_once('/').is_some_and(|(_, class)| class.contains('.')) {
            needed.push((Version(0, 6), "a dot in the class"));
        }
        for (index, device) in self.devices.iter().enumerate() {
            if !is_device_name(&device.name) {
                return Err(Failure::new(format!("{:?} is not the name of a device", device.name)));
            }
            if self.devices[..index].iter().any(|other| other.name == device.name) {
                return Err(Failure::new(format!("it has two devices \"{}\"", device.name)));
            }
            let about = |failure: Failure| failure.about(format!("device \"{}\"", device.name));
            device.container_edits.check().map_err(about)?;
            needed.extend(device.container_edits.needs());
            if device.name.starts_with(|first: char| first.is_ascii_digit()) {
                needed.push((Version(0, 5), "a device name that starts with a digit"));
            }
        }
        match needed.into_iter().max().filter(|(since, _)| *since > version) {
            Some((since, what)) => Err(Failure::new(format!(
                "cdiVersion {} does not have {what}; CDI has it since {since}",
                self.cdi_version
            ))),
            None => Ok(()),
        }
    }
}

/// The version alone, for files that are not understood otherwise.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    cdi_version: String,
}

fn version(text: &str) -> Result<Version, Failure> {
    let numbers: Option<Vec<u32>> = text.split('.').map(|number| number.parse().ok()).collect();
    let version = match numbers.as_deref() {
        Some([major, minor, _]) => Version(*major, *minor),
        _ => return Err(Failure::new(format!("cdiVersion \"{text}\" is not a version like {NEWEST}"))),
    };
    if version > NEWEST {
        return Err(Failure::new(format!(
            "cdiVersion {text} is newer than {NEWEST}, the newest that mizzen knows"
        ))
        .hint("have its generator write an older version, or use a newer mizzen"));
    }
    if !RELEASED.contains(&version) {
        return Err(Failure::new(format!("cdiVersion {text} is no version of CDI")));
    }
    Ok(version)
}

impl ContainerEdits {
    /// The fields that not every version has.
    fn needs(&self) -> Vec<(Version, &'static str)> {
        let newest_rdt = |rdt: &IntelRdt| rdt.schemata.is_some() || rdt.enable_monitoring.is_some();
        let used = [
            (self.mounts.iter().any(|mount| !mount.kind.is_empty()), Version(0, 4), "the type of a mount"),
            (
                self.device_nodes.iter().any(|node| node.host_path.is_some()),
                Version(0, 5),
                "the hostPath of a device node",
            ),
            (self.intel_rdt.is_some(), Version(0, 7), "intelRdt"),
            (!self.additional_gids.is_empty(), Version(0, 7), "additionalGids"),
            (self.intel_rdt.as_ref().is_some_and(newest_rdt), NEWEST, "the schemata of intelRdt"),
            (!self.net_devices.is_empty(), NEWEST, "netDevices"),
        ];
        used.into_iter().filter(|(used, ..)| *used).map(|(_, since, what)| (since, what)).collect()
    }

    fn check(&self) -> Result<(), Failure> {
        check_variables(&self.env)?;
        for node in &self.device_nodes {
            let named = |what: String| Failure::new(format!("device node {}: {what}", node.path.display()));
            check_path(&node.path, "device node")?;
            node.host_path.as_deref().map_or(Ok(()), |path| check_path(path, "device node"))?;
            if !["", "b", "c", "u", "p"].contains(&node.kind.as_str()) {
                return Err(named(format!("\"{}\" is not a type of device", node.kind)));
            }
            if node.permissions != "none" && !node.permissions.chars().all(|letter| "rwm".contains(letter)) {
                return Err(named(format!("\"{}\" are not permissions of a device", node.permissions)));
            }
        }
        for mount in &self.mounts {
            if mount.kind != "tmpfs" {
                check_path(&mount.host_path, "mount")?;
            }
            check_path(&mount.container_path, "mount")?;
        }
        let hooks =
            ["prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"];
        for hook in &self.hooks {
            if !hooks.contains(&hook.hook_name.as_str()) {
                return Err(Failure::new(format!("\"{}\" is not the name of a hook", hook.hook_name)));
            }
            check_path(&hook.path, "hook")?;
            check_variables(&hook.env)?;
        }
        if self.net_devices.iter().any(|net| net.host_interface_name.is_empty() || net.name.is_empty()) {
            return Err(Failure::new("a network device without a name"));
        }
        Ok(())
    }
}

fn check_path(path: &Path, what: &str) -> Result<(), Failure> {
    let plain = !path.as_os_str().as_encoded_bytes().iter().any(u8::is_ascii_control);
    match path.is_absolute() && plain {
        true => Ok(()),
        false => Err(Failure::new(format!("{what}: {path:?} is not an absolute path"))),
    }
}

fn check_variables(variables: &[String]) -> Result<(), Failure> {
    let bad =
        |text: &&String| text.contains('\0') || text.split_once('=').is_none_or(|(name, _)| name.is_empty());
    match variables.iter().find(bad) {
        Some(text) => Err(Failure::new(format!("variable {text:?} is not NAME=VALUE"))),
        None => Ok(()),
    }
}
