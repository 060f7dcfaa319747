use super::*;
use crate::FallbackReason;
use crate::template_value::TemplateValue;

fn compile(template: &str) -> ChatTemplate {
    let text = TemplateTexts { plain: template.into(), with_tools: None };
    ChatTemplate::compile(text, &PromptWorkLimits::default()).unwrap()
}

fn render_with(template: &str, json: &str) -> Result<String, Error> {
    let value = serde_json::from_str::<TemplateValue>(json).unwrap().0;
    let size = RenderSize { hint: 0, limit: 10_000 };
    let rendered = compile(template).render(vec![("x".into(), value)], WallTime { unix_seconds: 0 }, size);
    rendered.map(|(text, _)| text)
}

fn check(template: &str, json: &str, expected: &str) {
    assert_eq!(render_with(template, json).unwrap(), expected, "{template} {json}");
}

#[test]
fn blocks_are_trimmed_as_in_transformers() {
    check("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "1", "a\nb\nc");
}

#[test]
fn constants_print_as_in_python() {
    check(
        "{{ x.a }} {{ x.b }} {{ x.c }} {{ x.d }} {{ x.missing }}|",
        r#"{"a":null,"b":true,"c":1.0,"d":3}"#,
        "None True 1.0 3 |",
    );
    check("{{ x }}", r#"{"a":[1,"b'c",null,true]}"#, r#"{'a': [1, "b'c", None, True]}"#);
}

#[test]
fn nothing_is_escaped_for_html() {
    check("{{ x }} {{ x | tojson }}", r#""<a&'\">""#, r#"<a&'"> "<a&'\">""#);
}

#[test]
fn methods_and_white_space_behave_as_in_python() {
    check("[{{ x.strip() }}][{{ x | trim }}][{{ x.rstrip() }}]", "\"\\u001c a \\u001f\"", "[a][a][\u{1c} a]");
    check("{{ x.split('</think>')[-1].lstrip('\\n') }}", r#""a</think>\n\nb""#, "b");
    check("{{ x.split() | join('-') }}", r#"" a\tb\u001cc ""#, "a-b-c");
    check("{{ x.removeprefix('ab') }} {{ x.removesuffix('cd') }} {{ x.removeprefix('x') }}", r#""abcd""#, "cd ab abcd");
    check("{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}", r#"{"z":1,"a":2}"#, "z=1;a=2;");
}

#[test]
fn loop_controls_namespaces_and_slices_work() {
    check(
        "{% for i in x %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "[1,2,3,4]",
        "13",
    );
    check(
        "{% set ns = namespace(n=0) %}{% for i in x[::-1] %}{% set ns.n = ns.n * 10 + i %}{% endfor %}{{ ns.n }}",
        "[1,2,3]",
        "321",
    );
    check(
        "{% for i in x %}{{ loop.index0 }}{{ loop.last }}{{ loop.previtem is defined }} {% endfor %}",
        "[7,8]",
        "0FalseFalse 1TrueTrue ",
    );
}

#[test]
fn generation_tags_are_transparent() {
    check("{% if x %}{%- generation -%} {{ x }} {%- endgeneration -%}{% endif %}!", "\"a\"", "a!");
    check("generation {% generation %}\n{{ x }}{% endgeneration %}", "1", "generation 1");
}

#[test]
fn a_tag_that_never_ends_is_an_error() {
    for template in ["{%}", "{%}x{%", "{% if x %}{%}{% endif %}", "{%-%"] {
        let text = TemplateTexts { plain: template.into(), with_tools: None };
        assert!(ChatTemplate::compile(text, &PromptWorkLimits::default()).is_err(), "{template}");
    }
}

#[test]
fn date_is_supplied_by_the_caller() {
    check("{{ strftime_now('%d %B %Y') }}", "1", "01 January 1970");
    assert!(render_with("{{ strftime_now('%Q') }}", "1").is_err());
}

#[test]
fn template_refusal_keeps_its_message() {
    let error = PrefixError::from(render_with("{{ raise_exception('roles must alternate') }}", "1").unwrap_err());
    assert!(error.to_string().contains("roles must alternate"), "{error}");
    assert_eq!(error.reason(), FallbackReason::TemplateError);
}

#[test]
fn attributes_of_undefined_values_are_errors_as_in_jinja() {
    assert!(render_with("{{ x.a.b }}", "{}").is_err());
    assert!(render_with("{{ nothing.at.all }}", "{}").is_err());
    assert!(render_with("{{ x + 1 }}", "\"a\"").is_err());
}

#[test]
fn endless_loops_and_endless_output_are_stopped() {
    let work = "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";
    let error = PrefixError::from(render_with(work, "1").unwrap_err());
    assert_eq!(error.reason(), FallbackReason::TooLarge, "{error}");
    let error = PrefixError::from(render_with("{% for a in range(2000) %}0123456789{% endfor %}", "1").unwrap_err());
    assert_eq!(error.reason(), FallbackReason::TooLarge, "{error}");
    let recursion = render_with("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "1");
    assert!(recursion.is_err());
}

#[test]
fn template_that_does_not_compile_is_rejected_at_load() {
    let text = TemplateTexts { plain: "{% if %}".into(), with_tools: None };
    assert!(
        ChatTemplate::compile(text, &PromptWorkLimits::default()).unwrap_err().to_string().contains("chat template")
    );
}

#[test]
fn tool_template_is_used_only_when_there_are_tools() {
    let text = TemplateTexts { plain: "plain".into(), with_tools: Some("tools".into()) };
    let template = ChatTemplate::compile(text, &PromptWorkLimits::default()).unwrap();
    let render = |tools: Value| {
        template
            .render(vec![("tools".into(), tools)], WallTime::default(), RenderSize { hint: 0, limit: 100 })
            .unwrap()
            .0
    };
    assert_eq!(render(Value::from(())), "plain");
    assert_eq!(render(Value::from(vec![1])), "tools");
}

#[test]
fn overlong_text_is_rejected_before_it_is_built() {
    let limits = PromptWorkLimits { rendered_bytes: vocabulary::Bytes(10_000), ..PromptWorkLimits::default() };
    let compile = |plain: &str| {
        let text = TemplateTexts { plain: plain.into(), with_tools: None };
        ChatTemplate::compile(text, &limits).unwrap()
    };
    let long = "([1] * 2000000)";
    for expression in [long.to_owned(), format!("{long} | string"), format!("{long} | trim"), "'a' * 10001".to_owned()]
    {
        let template = compile(&format!("{{{{ {expression} }}}}"));
        let rendered = template.render(vec![], WallTime { unix_seconds: 0 }, RenderSize { hint: 0, limit: 10_000 });
        assert!(rendered.is_err(), "{expression}");
        assert_eq!(
            template.system_placement(),
            AllowedSystemPosition::Head,
            "{expression}: it is not tried any further either"
        );
    }
    assert_eq!(compile("{{ 'a' * 10000 }}").system_placement(), AllowedSystemPosition::Anywhere);
}
