//! `mizzen login` and `mizzen logout`.

use std::os::unix::fs::PermissionsExt;

use mizzen_import::registry::{PasswordSource, Secret, login, logout};

use super::server::{Reply, Server};
use super::support::{Setup, encoded, image, manifest_text, setup};

/// A registry that lets in me, with the password `right`.
fn registry() -> Server {
    let good = format!("Basic {}", encoded("me:right"));
    Server::start(move |seen| match seen.authorization() {
        Some(header) if header == good => Reply::ok(manifest_text()),
        _ => Reply::error(401, "UNAUTHORIZED", "no").header("WWW-Authenticate", "Basic realm=\"x\""),
    })
}

fn log_in(setup: &Setup, server: &Server, password: &str) -> Result<String, mizzen_core::Failure> {
    login(setup.options(), &server.host(), Some("me"), PasswordSource::Given(Secret::new(password)))
}

#[test]
fn a_login_is_tried_kept_and_used() {
    let server = registry();
    let setup = setup().plain(&server);
    let host = server.host();
    let file = setup.home.path().join(".config/containers/auth.json");
    let text = log_in(&setup, &server, "right").unwrap();
    assert_eq!(text, format!("logged in to {host} as me; kept in {}\n", file.display()));
    assert_eq!(server.log(), ["GET /v2/ []", &format!("GET /v2/ [Basic {}]", encoded("me:right"))]);
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let directory = std::fs::metadata(file.parent().unwrap()).unwrap();
    assert_eq!(directory.permissions().mode() & 0o777, 0o700);
    setup.client().manifest(&image(&host)).unwrap();
    let text = logout(&setup.options(), &host).unwrap();
    assert_eq!(text, format!("removed the login to {host} from {}\n", file.display()));
    assert!(setup.client().manifest(&image(&host)).is_err());
    let failure = logout(&setup.options(), &host).unwrap_err();
    assert_eq!(failure.message, format!("{host}: there is no login"));
}

#[test]
fn a_wrong_password_is_not_kept() {
    let server = registry();
    let setup = setup().plain(&server);
    let failure = log_in(&setup, &server, "wrong").unwrap_err();
    let host = server.host();
    assert_eq!(
        failure.message,
        format!("{host}: the login is refused (me, from the command line): 401 Unauthorized: no")
    );
    assert!(!setup.home.path().join(".config").exists());
    let failure = log_in(&setup, &server, "").unwrap_err();
    assert_eq!(failure.message, format!("{host}: the password is empty"));
    let failure = login(setup.options(), &host, None, PasswordSource::Given(Secret::new("x"))).unwrap_err();
    assert_eq!(
        (failure.message, failure.hint.unwrap()),
        (format!("{host}: whose password is it?"), "add -u USER".to_owned())
    );
}

#[test]
fn tokens_are_tried_as_well() {
    let tokens = Server::start(|seen| match seen.authorization() {
        Some(header) if header == format!("Basic {}", encoded("me:right")) => Reply::ok(r#"{"token":"t"}"#),
        _ => Reply::new(401),
    });
    let realm = format!(r#"Bearer realm="{}",service="s""#, tokens.url("/token"));
    let server = Server::start(move |seen| match seen.authorization() {
        Some("Bearer t") => Reply::ok("{}"),
        _ => Reply::new(401).header("WWW-Authenticate", &realm),
    });
    let setup = setup().plain(&server);
    assert!(log_in(&setup, &server, "right").is_ok());
    assert_eq!(tokens.seen()[0].path, "/token?service=s&account=me");
    let failure = log_in(&setup, &server, "wrong").unwrap_err();
    let host = server.host();
    let expected = format!("{host}: the login is refused (me, from the command line): 401 Unauthorized");
    assert_eq!(failure.message, expected);
}

#[test]
fn dockers_file_is_used_if_it_keeps_passwords() {
    let server = registry();
    let host = server.host();
    let setup =
        setup().plain(&server).docker_config(r#"{"proxies":{"x":1},"auths":{"b.io":{"auth":"eDp5"}}}"#);
    log_in(&setup, &server, "right").unwrap();
    let text = setup.home.read(".docker/config.json");
    let content: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(content["proxies"]["x"], 1);
    assert_eq!(content["auths"]["b.io"]["auth"], "eDp5");
    assert_eq!(content["auths"][&host]["auth"], encoded("me:right"));
    logout(&setup.options(), &host).unwrap();
    let content: serde_json::Value = serde_json::from_str(&setup.home.read(".docker/config.json")).unwrap();
    assert_eq!(content["auths"], serde_json::json!({"b.io": {"auth": "eDp5"}}));
    // One whose passwords a helper keeps is left alone.
    let setup = super::support::setup().plain(&server).docker_config(r#"{"credsStore":"no-such-helper"}"#);
    log_in(&setup, &server, "right").unwrap();
    assert_eq!(setup.home.read(".docker/config.json"), r#"{"credsStore":"no-such-helper"}"#);
    assert!(setup.home.read(".config/containers/auth.json").contains(&host));
}

#[test]
fn the_file_can_be_named() {
    let server = registry();
    let mut setup = setup().plain(&server);
    let target = setup.home.file("real.json", "");
    let link = setup.home.path().join("link.json");
    std::os::unix::fs::symlink(&target, &link).unwrap();
    setup.authfile = Some(link.clone());
    log_in(&setup, &server, "right").unwrap();
    assert!(link.is_symlink(), "a link stays one");
    assert!(setup.home.read("real.json").contains(&server.host()));
    let variable = super::support::setup().plain(&server);
    let path = variable.home.path().join("new/auth.json");
    let variable = variable.variable("REGISTRY_AUTH_FILE", path.to_str().unwrap());
    log_in(&variable, &server, "right").unwrap();
    assert!(path.exists());
    let entries = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(entries, 1, "nothing else is left");
}

#[test]
fn what_would_not_be_used_is_told() {
    let server = registry();
    let host = server.host();
    let config = format!(r#"{{"credHelpers":{{"{host}":"x"}}}}"#);
    let setup = setup().plain(&server).docker_config(&config);
    let failure = log_in(&setup, &server, "right").unwrap_err();
    let file = setup.home.path().join(".docker/config.json");
    assert_eq!(
        failure.message,
        format!("{}: docker-credential-x keeps the logins to {host}", file.display())
    );
    let setup = super::support::setup().plain(&server).docker_config("{}");
    let earlier = setup.home.file(
        ".config/containers/auth.json",
        &format!(r#"{{"auths":{{"{host}":{{"auth":"{}"}}}}}}"#, encoded("other:x")),
    );
    log_in(&setup, &server, "right").unwrap();
    let note = format!("another login to {host} is found first: other, from {}", earlier.display());
    assert_eq!(setup.notes(), [note]);
    // What another program keeps stays.
    setup.home.file(".config/enroot/.credentials", "machine 127.0.0.1 login u password p");
    let failure = logout(&setup.options(), &host).unwrap_err();
    let left = setup.home.path().join(".config/enroot/.credentials");
    assert_eq!(failure.message, format!("{host}: there is still a login: u, from {}", left.display()));
}

#[test]
fn what_is_no_registry_is_told() {
    let server = Server::start(|_| Reply::new(404));
    let setup = setup().plain(&server);
    let failure = log_in(&setup, &server, "x").unwrap_err();
    let expected = format!("{}: it is not a registry (404 Not Found)", server.host());
    assert_eq!(failure.message, expected);
}

#[test]
fn a_registry_for_everybody_tries_no_password() {
    let server = Server::start(|_| Reply::ok("{}"));
    let setup = setup().plain(&server);
    log_in(&setup, &server, "x").unwrap();
    let host = server.host();
    assert_eq!(setup.notes(), [format!("{host} lets everybody in, and has not tried the password")]);
}
