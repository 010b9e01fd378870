//! What a registry wants to see: the header WWW-Authenticate.
//!
//! Run by: the user, in the importer.

/// How a registry lets somebody in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Challenge {
    /// With name and password.
    Basic,
    /// With a token, which another server gives.
    Bearer {
        /// The address of that server.
        realm: String,
        /// What the registry is called there.
        service: String,
        /// What the token is to be good for.
        scope: String,
    },
}

/// The best of several: a token, which is not the password itself.
pub fn choose(headers: &[&str]) -> Option<Challenge> {
    let all: Vec<Challenge> = headers.iter().flat_map(|header| parse(header)).collect();
    let token = all.iter().find(|challenge| matches!(challenge, Challenge::Bearer { .. }));
    token.or(all.first()).cloned()
}

/// One header may have several: `Basic realm="a", Bearer realm="b",service="c"`.
fn parse(header: &str) -> Vec<Challenge> {
    let mut challenges: Vec<(String, Vec<(String, String)>)> = Vec::new();
    let mut rest = header.trim_start();
    while !rest.is_empty() {
        let (word, after) = token(rest);
        if word.is_empty() {
            // Not understood: a comma, or anything else; every round takes at least one character.
            rest = skip_one(rest).trim_start();
            continue;
        }
        let after = after.trim_start();
        match after.strip_prefix('=') {
            Some(value) => {
                let (value, after) = quoted_or_token(value.trim_start());
                if let Some((_, parameters)) = challenges.last_mut() {
                    parameters.push((word.to_ascii_lowercase(), value));
                }
                rest = after.trim_start();
            }
            None => {
                challenges.push((word.to_ascii_lowercase(), Vec::new()));
                rest = after;
            }
        }
    }
    challenges.iter().filter_map(|(scheme, parameters)| challenge(scheme, parameters)).collect()
}

fn challenge(scheme: &str, parameters: &[(String, String)]) -> Option<Challenge> {
    let value = |name: &str| {
        let found = parameters.iter().find(|(parameter, _)| parameter == name);
        found.map(|(_, value)| value.clone()).unwrap_or_default()
    };
    match scheme {
        "basic" => Some(Challenge::Basic),
        "bearer" if !value("realm").is_empty() => Some(Challenge::Bearer {
            realm: value("realm"),
            service: value("service"),
            scope: value("scope"),
        }),
        _ => None,
    }
}

fn skip_one(text: &str) -> &str {
    let mut rest = text.chars();
    rest.next();
    rest.as_str()
}

fn token(text: &str) -> (&str, &str) {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    text.split_at(text.bytes().take_while(|byte| good(*byte)).count())
}

fn quoted_or_token(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ' ']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut rest = quoted.chars();
    while let Some(c) = rest.next() {
        match c {
            '"' => break,
            '\\' => value.extend(rest.next()),
            c => value.push(c),
        }
    }
    (value, rest.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(realm: &str, service: &str, scope: &str) -> Challenge {
        Challenge::Bearer { realm: realm.to_owned(), service: service.to_owned(), scope: scope.to_owned() }
    }

    #[test]
    fn challenges_are_understood() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push""#;
        assert_eq!(
            choose(&[hub]),
            Some(bearer("https://auth.docker.io/token", "registry.docker.io", "repository:a/b:pull,push"))
        );
        assert_eq!(choose(&[r#"Basic realm="a \"b\", c""#]), Some(Challenge::Basic));
        assert_eq!(choose(&["basic"]), Some(Challenge::Basic));
        let both = r#"Basic realm="x", bearer Realm = "https://t" , service=s"#;
        assert_eq!(choose(&[both]), Some(bearer("https://t", "s", "")));
        assert_eq!(
            choose(&[r#"Basic realm="x""#, r#"Bearer realm="https://t""#]),
            Some(bearer("https://t", "", ""))
        );
        for nothing in
            ["", "Bearer", "Digest realm=\"x\"", ",,,=\"", "Negotiate abc==", "Bearer realm=\"", "é\"="]
        {
            assert_eq!(choose(&[nothing]), None, "{nothing}");
        }
        assert_eq!(choose(&["Bearer realm=\"x\\"]), Some(bearer("x", "", "")));
    }
}
