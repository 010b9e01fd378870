//! An OCI image's configuration, as mizzen keeps it in the image. Runs as the user on the host.

use std::collections::BTreeMap;
use std::ffi::OsString;

use mizzen_core::Failure;
use serde::Deserialize;
use serde_json::Value;

use super::variables::Variables;
use super::{Architecture, Maker, Metadata, REMAKE, Tree, file, json, labels};

pub const CONFIG: &str = "/.mizzen/config.json";

/// The parts of the OCI image configuration that we honour. User is left out on purpose: the user of the job
/// is the user in the container. Makers write null for what is empty.
#[derive(Deserialize)]
struct Document {
    architecture: Option<String>,
    config: Option<Config>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Config {
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    labels: Option<BTreeMap<String, Value>>,
}

pub fn read(tree: &dyn Tree) -> Result<Metadata, Failure> {
    let document: Document = json(CONFIG, &file(tree, CONFIG)?.unwrap_or_default())?;
    let config = document.config.unwrap_or_default();
    let mut metadata = Metadata::new(Maker::Oci);
    let mut variables = Variables::new(&|_| None);
    for (number, text) in config.env.unwrap_or_default().into_iter().enumerate() {
        variables.set_text(text.as_bytes(), || format!("{CONFIG}:Env[{number}]"))?;
    }
    metadata.set_variables(variables);
    metadata.entrypoint = arguments("Entrypoint", config.entrypoint)?;
    metadata.command = arguments("Cmd", config.cmd)?;
    metadata.set_workdir(config.working_dir.unwrap_or_default().as_bytes());
    metadata.labels = labels(config.labels);
    metadata.architecture = document.architecture.as_deref().and_then(Architecture::from_oci);
    Ok(metadata)
}

/// Arguments of a program: exec cannot pass a NUL, and half a command would be another command.
fn arguments(field: &str, list: Option<Vec<String>>) -> Result<Vec<OsString>, Failure> {
    let list = list.unwrap_or_default();
    if list.iter().any(|argument| argument.contains('\0')) {
        let message = format!("{CONFIG} in the image is damaged: {field} contains a NUL");
        return Err(Failure::new(message).hint(REMAKE));
    }
    Ok(list.into_iter().map(OsString::from).collect())
}
