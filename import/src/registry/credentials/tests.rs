//! Whose name and password is found where.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::*;

/// A home that goes away with its owner.
struct Home {
    path: PathBuf,
    notes: Arc<Mutex<Vec<String>>>,
}

impl Home {
    fn new() -> Home {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("mizzen-credentials-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Home { path, notes: Arc::default() }
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.path.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    fn helper(&self, name: &str, script: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.file(&format!("bin/docker-credential-{name}"), &format!("#!/bin/sh\n{script}\n"));
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn credentials(&self, variables: &[(&str, &str)]) -> Credentials {
        let bin = format!("{}:/usr/bin:/bin", self.path.join("bin").display());
        let home = self.path.to_str().unwrap();
        let notes = self.notes.clone();
        Credentials {
            given: None,
            authfile: None,
            environment: Environment::of(
                variables
                    .iter()
                    .copied()
                    .chain([("HOME", home), ("PATH", &bin)])
                    .map(|(n, v)| (n, v.to_owned())),
            ),
            notes: Notes::new(move |text| notes.lock().unwrap().push(text.to_owned())),
        }
    }

    /// `user:password` for a repository, or what else there is.
    fn find(&self, host: &str, repository: &str, user: Option<&str>) -> String {
        shown(self.credentials(&[]).find(&Wanted { host, repository, user }, true).unwrap())
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn shown(login: Option<Login>) -> String {
    match login.map(|login| login.credential) {
        None => "none".to_owned(),
        Some(Credential::Password { user, password }) => format!("{user}:{}", password.expose()),
        Some(Credential::IdentityToken(token)) => format!("identity {}", token.expose()),
        Some(Credential::RegistryToken(token)) => format!("token {}", token.expose()),
    }
}

fn auth(login: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(login)
}

fn file_with(key: &str, login: &str) -> String {
    format!(r#"{{"auths":{{"{key}":{{"auth":"{}"}}}}}}"#, auth(login))
}

const WANTED: Wanted = Wanted { host: "a.io", repository: "x/y", user: None };

#[test]
fn files_are_read_in_podmans_order() {
    let home = Home::new();
    let home_text = home.path.to_str().unwrap().to_owned();
    let run = format!("{home_text}/run");
    let option = home.file("option.json", &file_with("a.io", "option:1"));
    let named = home.file("named.json", &file_with("a.io", "named:1"));
    let places = [
        home.file("run/containers/auth.json", &file_with("a.io", "run:1")),
        home.file(".config/containers/auth.json", &file_with("a.io", "config:1")),
        home.file(".docker/config.json", &file_with("a.io", "docker:1")),
        home.file(".config/enroot/.credentials", "machine a.io login enroot password 1\n"),
    ];
    let variables = [("XDG_RUNTIME_DIR", run.as_str()), ("REGISTRY_AUTH_FILE", named.to_str().unwrap())];
    let mut credentials = home.credentials(&variables);
    credentials.authfile = Some(option.clone());
    credentials.given = Some(("given".to_owned(), Secret::new("1")));
    let find = |credentials: &Credentials| shown(credentials.find(&WANTED, true).unwrap());
    assert_eq!(find(&credentials), "given:1");
    // Not for a mirror.
    assert_eq!(shown(credentials.find(&WANTED, false).unwrap()), "option:1");
    credentials.given = None;
    assert_eq!(find(&credentials), "option:1");
    std::fs::write(&option, "{}").unwrap();
    assert_eq!(find(&credentials), "named:1");
    std::fs::remove_file(&named).unwrap();
    for (place, found) in places.iter().zip(["run:1", "config:1", "docker:1", "enroot:1"]) {
        assert_eq!(find(&credentials), found);
        std::fs::remove_file(place).unwrap();
    }
    assert_eq!(find(&credentials), "none");
    credentials.authfile = Some("/no/such.json".into());
    let failure = credentials.find(&WANTED, true).unwrap_err();
    assert_eq!(failure.message, "--authfile: /no/such.json: no such file");
}

#[test]
fn the_closest_name_wins() {
    let home = Home::new();
    let entry = |key: &str, login: &str| format!(r#""{key}":{{"auth":"{}"}}"#, auth(login));
    let entries = [
        entry("a.io", "host:1"),
        entry("a.io/x", "project:1"),
        entry("a.io/x/y", "image:1"),
        entry("https://b.io/v1/", "old:1"),
        entry("https://index.docker.io/v1/", "hub:1"),
        entry("c.io:5000", "port:1"),
    ];
    home.file(".docker/config.json", &format!(r#"{{"auths":{{{}}},"HttpHeaders":null}}"#, entries.join(",")));
    for (host, repository, found) in [
        ("a.io", "x/y", "image:1"),
        ("a.io", "x/z", "project:1"),
        ("a.io", "x/z/deep", "project:1"),
        ("a.io", "xx/y", "host:1"),
        ("a.io", "", "host:1"),
        ("b.io", "x", "old:1"),
        ("docker.io", "library/ubuntu", "hub:1"),
        ("c.io:5000", "x", "port:1"),
        ("c.io", "x", "none"),
        ("sub.a.io", "x", "none"),
        ("a.io.evil.io", "x", "none"),
    ] {
        assert_eq!(home.find(host, repository, None), found, "{host}/{repository}");
    }
}

#[test]
fn entries_have_many_forms() {
    for (entry, found) in [
        (format!(r#"{{"auth":"{}"}}"#, auth("u:p:with:colons")), "u:p:with:colons"),
        (format!(r#"{{"auth":"{}"}}"#, auth("$oauthtoken:key")), "$oauthtoken:key"),
        (format!(r#"{{"auth":"{}"}}"#, auth("u:p\0\0")), "u:p"),
        (r#"{"username":"u","password":"p"}"#.to_owned(), "u:p"),
        (r#"{"auth":null,"identitytoken":"i"}"#.to_owned(), "identity i"),
        (r#"{"registrytoken":"r"}"#.to_owned(), "token r"),
        ("{}".to_owned(), "none"),
        (r#"{"auth":"!!!"}"#.to_owned(), "none"),
        (format!(r#"{{"auth":"{}"}}"#, auth("nocolon")), "none"),
        (r#"{"auth":"","email":"x@y"}"#.to_owned(), "none"),
    ] {
        let home = Home::new();
        home.file(".docker/config.json", &format!(r#"{{"auths":{{"a.io":{entry}}}}}"#));
        assert_eq!(home.find("a.io", "x", None), found, "{entry}");
    }
}

#[test]
fn what_cannot_be_read_is_told_without_its_content() {
    let home = Home::new();
    let path = home.file(".docker/config.json", "{\"auths\": {\"a.io\": {\"auth\": secret}}}");
    assert_eq!(home.find("a.io", "x", None), "none");
    let note =
        format!("{}: not a file of credentials: line 1, column 29; going on without it", path.display());
    assert_eq!(*home.notes.lock().unwrap(), [note]);
    let credentials = Credentials { authfile: Some(path.clone()), ..home.credentials(&[]) };
    let failure = credentials.find(&WANTED, true).unwrap_err();
    let expected = format!("--authfile: {}: not a file of credentials: line 1, column 29", path.display());
    assert_eq!(failure.message, expected);
    std::fs::write(&path, "  \n").unwrap();
    assert_eq!(home.find("a.io", "x", None), "none");
}

#[test]
fn helpers_are_asked() {
    let home = Home::new();
    home.helper(
        "good",
        r#"[ "$1" = get ] || exit 1
read host || true
case $host in
a.io) echo '{"ServerURL":"a.io","Username":"u","Secret":"p"}' ;;
https://index.docker.io/v1/) echo '{"Username":"<token>","Secret":"i"}' ;;
broken.io) echo 'no json'; ;;
failing.io) echo 'the keyring is locked'; exit 1 ;;
*) echo 'credentials not found in native keychain'; exit 1 ;;
esac"#,
    );
    home.file(".docker/config.json", r#"{"auths":{"a.io":{}},"credsStore":"good"}"#);
    assert_eq!(home.find("a.io", "x", None), "u:p");
    assert_eq!(home.find("docker.io", "library/x", None), "identity i");
    assert_eq!(home.find("other.io", "x", None), "none");
    assert_eq!(home.notes.lock().unwrap().len(), 0);
    assert_eq!(home.find("broken.io", "x", None), "none");
    assert_eq!(home.find("failing.io", "x", None), "none");
    let file = home.path.join(".docker/config.json");
    let note =
        |text: &str| format!("{}: docker-credential-good: {text}; going on without it", file.display());
    assert_eq!(
        *home.notes.lock().unwrap(),
        [note("its answer is not understood"), note("it failed: the keyring is locked")]
    );
    // One for one registry goes before what stands beside it.
    let entry = format!(r#""a.io":{{"auth":"{}"}}"#, auth("file:1"));
    home.file(".docker/config.json", &format!(r#"{{"auths":{{{entry}}},"credHelpers":{{"a.io":"good"}}}}"#));
    assert_eq!(home.find("a.io", "x", None), "u:p");
    assert_eq!(home.find("a.io", "x", Some("file")), "file:1");
}

#[test]
fn helpers_that_do_not_help_are_no_failure() {
    let home = Home::new();
    for (name, problem) in [
        ("missing", "docker-credential-missing: cannot run it: No such file or directory"),
        ("../../evil", "\"../../evil\" is not the name of a credential helper"),
    ] {
        home.notes.lock().unwrap().clear();
        let file = home.file(".docker/config.json", &format!(r#"{{"credHelpers":{{"a.io":"{name}"}}}}"#));
        assert_eq!(home.find("a.io", "x", None), "none");
        let note = format!("{}: {problem}; going on without it", file.display());
        assert_eq!(*home.notes.lock().unwrap(), [note]);
    }
}

#[test]
fn enroots_lines_are_understood() {
    let home = Home::new();
    let text = "# NGC\n\
        machine nvcr.io login $oauthtoken password ngc-key\n\
        machine authn.nvidia.com login $oauthtoken password other-key\n\
        machine auth.docker.io login me password hub-token\n\
        machine g.io\n  login first\n  password 1\n\
        machine g.io login second password 2\n\
        machine v.io login \"quoted\" password ${KEY}-$KEY-$$-$MISSING\n\
        machine port.io login u password p\n\
        machine empty.io login u\n\
        default login any password any\n";
    home.file(".config/enroot/.credentials", text);
    for (host, user, found) in [
        ("nvcr.io", None, "$oauthtoken:ngc-key"),
        ("nvcr.io", Some("$oauthtoken"), "$oauthtoken:ngc-key"),
        ("docker.io", None, "me:hub-token"),
        ("g.io", None, "first:1"),
        ("g.io", Some("second"), "second:2"),
        ("g.io", Some("third"), "none"),
        ("port.io:5000", None, "u:p"),
        ("empty.io", None, "none"),
        ("unknown.io", None, "none"),
        // A registry cannot borrow the line of the server that gives tokens to another.
        ("authn.nvidia.com.evil.io", None, "none"),
    ] {
        assert_eq!(home.find(host, "x", user), found, "{host}");
    }
    let credentials = home.credentials(&[("KEY", "k"), ("oauthtoken", "x")]);
    let find = |host| shown(credentials.find(&Wanted { host, repository: "x", user: None }, true).unwrap());
    assert_eq!(find("v.io"), "quoted:k-k-$$-$MISSING");
    assert_eq!(find("nvcr.io"), "$oauthtoken:ngc-key");
    let elsewhere = home.path.join("elsewhere");
    let credentials = home.credentials(&[("ENROOT_CONFIG_PATH", elsewhere.to_str().unwrap())]);
    assert_eq!(shown(credentials.find(&WANTED, true).unwrap()), "none");
}

#[test]
fn the_user_chooses_among_several() {
    let home = Home::new();
    home.file(".config/containers/auth.json", &file_with("a.io", "one:1"));
    home.file(".docker/config.json", &file_with("a.io", "two:2"));
    assert_eq!(home.find("a.io", "x", None), "one:1");
    assert_eq!(home.find("a.io", "x", Some("two")), "two:2");
    assert_eq!(home.find("a.io", "x", Some("three")), "none");
}

#[test]
fn no_debug_text_shows_a_secret() {
    let credential = Credential::Password { user: "u".to_owned(), password: Secret::new("hidden") };
    assert!(!format!("{credential:?}").contains("hidden"));
    let login = Login { credential, origin: "a file".to_owned() };
    assert_eq!(login.shown(), "u, from a file");
}
