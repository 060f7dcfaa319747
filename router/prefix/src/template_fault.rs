//! Whether a chat template shows what is said at all, found out at load: one that does not would give every conversation
//! the same prompt, and one that fails none.

use crate::{ChatBody, ModelText, PrefixError, WallTime};

/// Characters of an error's text that are kept.
const MESSAGE_CHARS: usize = 300;

/// Two conversations of which no template should make the same prompt. A user is the only role that all templates take.
const SAID: [&str; 2] =
    [r#"{"role":"user","content":"otter"}"#, r#"{"role":"user","content":"Cranes and 17 geckos, all of them"}"#];
/// For templates that want to be told what they are first.
const SYSTEM: &str = r#"{"role":"system","content":"You are a heron."},"#;

/// What is wrong with a chat template.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TemplateFault {
    /// Nothing but white space comes out of it.
    #[error("renders nothing")]
    Empty,
    /// What comes out does not depend on what is said, in whatever shape it might be shown.
    #[error("renders nothing of what is said")]
    Silent,
    /// It fails for every conversation that was tried.
    #[error("fails with {0:?}")]
    Fails(Box<str>),
}

impl TemplateFault {
    /// What is wrong with the model's template, if it has one and something is.
    pub(crate) fn probe(text: &ModelText) -> Option<Self> {
        if !text.has_template() {
            return None;
        }
        let plain = Self::shown(text, "");
        let Err(error) = plain else { return plain.ok().flatten() };
        match Self::shown(text, SYSTEM) {
            Ok(fault) => fault,
            Err(_) => Some(Self::Fails(error.to_string().chars().take(MESSAGE_CHARS).collect())),
        }
    }

    fn shown(text: &ModelText, before: &str) -> Result<Option<Self>, PrefixError> {
        let prompt = |said: &str| {
            let body = format!(r#"{{"messages":[{before}{said}]}}"#);
            text.render(&ChatBody::parse(body.as_bytes())?, WallTime::default())
        };
        let [one, other] = [prompt(SAID[0])?, prompt(SAID[1])?];
        Ok(match one == other {
            true if one.trim().is_empty() => Some(Self::Empty),
            true => Some(Self::Silent),
            false => None,
        })
    }

    /// Whether prompts come out of it that are nobody's: what fails gives none.
    pub(crate) fn misleads(&self) -> bool {
        !matches!(self, Self::Fails(_))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{Asked, FallbackReason, Identifier, IdentifierOptions, Identity, Limits, ModelFiles, ModelTextSource};

    fn files(model: &str) -> ModelFiles<'static> {
        ModelFiles::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(model)).unwrap()
    }

    fn of_template(template: &str) -> ModelText {
        let chat_template = Some(template.as_bytes().to_vec().into());
        let files = ModelFiles { chat_template, ..files("../../configs/models/tiny") };
        ModelText::load(ModelTextSource::Files(files)).unwrap()
    }

    fn fault(template: &str) -> Option<TemplateFault> {
        of_template(template).template_fault().cloned()
    }

    #[test]
    fn a_template_that_shows_nothing_is_told_from_one_that_shows_nothing_of_what_is_said() {
        assert_eq!(fault(""), Some(TemplateFault::Empty));
        assert_eq!(fault("{% for m in messages %}\n{{ m.contents }}{% endfor %}\n"), Some(TemplateFault::Empty));
        assert_eq!(fault("{% for m in messages %}<{{ m.role }}>{% endfor %}"), Some(TemplateFault::Silent));
    }

    #[test]
    fn a_template_that_fails_for_everybody_is_told_with_its_message() {
        let Some(TemplateFault::Fails(message)) = fault("{{ raise_exception('no such luck') }}") else { panic!() };
        assert!(message.contains("no such luck"), "{message}");
    }

    #[test]
    fn what_is_said_may_be_shown_in_any_shape() {
        for shown in ["m.content | upper", "m.content | reverse", "m.content[:2] | title", "m.content | length"] {
            assert_eq!(fault(&format!("{{% for m in messages %}}{{{{ {shown} }}}}{{% endfor %}}")), None, "{shown}");
        }
    }

    #[test]
    fn a_template_may_refuse_a_role_or_want_one() {
        let refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}";
        let wants =
            "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[1].content }}";
        assert_eq!([fault(refuses), fault(wants)], [None, None]);
    }

    #[test]
    fn no_template_that_is_known_to_work_has_a_fault() {
        let folders = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/models")).unwrap();
        for folder in folders {
            let template = std::fs::read_to_string(folder.unwrap().path().join("chat_template.jinja"));
            let Ok(template) = template else { continue };
            assert_eq!(fault(&template), None, "{template}");
        }
        let none = ModelFiles { chat_template: None, ..files("../../configs/models/tiny") };
        assert_eq!(ModelText::load(ModelTextSource::Files(none)).unwrap().template_fault(), None, "there is none");
    }

    #[test]
    fn conversations_that_all_give_the_same_prompt_are_known_by_their_bytes() {
        let text = Some(std::sync::Arc::new(of_template("You are kind.")));
        let namespace = vocabulary::Namespace { model: "m".into(), revision: "".into(), tokenizer: "".into() };
        let (seed, block) = (vocabulary::Seed(0), vocabulary::Tokens(16));
        let identifier = Identifier::new(IdentifierOptions { namespace, seed, block, text, limits: Limits::default() });
        let known = |said: &str| identifier.chat(format!(r#"{{"messages":[{said}]}}"#).as_bytes(), Asked::default());
        let [one, other] = SAID.map(known);
        assert_eq!(one.identity, Identity::Fallback(FallbackReason::TemplateError));
        assert_ne!(one.content, other.content);
        assert!(identifier.text().unwrap().windowing().is_none());
    }
}
